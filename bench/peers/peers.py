"""Merges one adapter into one file in three ways and prints what each costs: PEFT's merge_adapter and unmerge_adapter, the usual
load-merge-save script, and pageflip. Each way runs in a process of its own, on files that are in the page cache.

usage: peers.py PAGEFLIP DIR    DIR holds weights.safetensors and PEFT directories a and b
       peers.py --peft DIR | --script DIR    one of the ways, for the parent: a line of JSON
"""
import json
import os
import subprocess
import sys
import threading
import time

GB, MIB = 1e9, 2**20


class Peak:
    """Anonymous memory of this process, sampled every 5 ms; in bytes above what it was at the start."""

    def __enter__(self):
        self.first = self.most = self.now()
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()
        return self

    def run(self):
        while not self.stop.wait(0.005):
            self.most = max(self.most, self.now())

    def __exit__(self, *_):
        self.stop.set()
        self.thread.join()
        self.most = max(self.most, self.now())
        self.added = self.most - self.first

    @staticmethod
    def now():
        with open("/proc/self/status", encoding="ascii") as status:
            return sum(int(line.split()[1]) * 1024 for line in status if line.startswith(("RssAnon", "RssShmem")))


def timed(fn):
    t0 = time.perf_counter()
    value = fn()
    return time.perf_counter() - t0, value


def targets_of(config):
    return tuple(config["target_modules"])


def module_tree(weights, targets):
    """A module with the names of the file, as a model's code would make it; linears for what the adapter addresses."""
    from torch import nn

    root = nn.Module()
    for name, tensor in weights.items():
        *path, leaf = name.split(".")
        is_linear = leaf == "weight" and ".".join(path).endswith(targets)
        node = root
        for i, part in enumerate(path):
            if not hasattr(node, part):
                is_last = i + 1 == len(path)
                child = nn.Linear(tensor.shape[1], tensor.shape[0], bias=False, device="meta") if is_last and is_linear else nn.Module()
                node.add_module(part, child)
            node = getattr(node, part)
        setattr(node, leaf, nn.Parameter(tensor, requires_grad=False))
    return root


def peft_way(directory):
    import torch
    from peft import PeftModel
    from safetensors.torch import load_file

    path = os.path.join(directory, "weights.safetensors")
    with open(os.path.join(directory, "a", "adapter_config.json"), encoding="utf-8") as config:
        targets = targets_of(json.load(config))
    with Peak() as peak:
        load_s, weights = timed(lambda: load_file(path))
        root = module_tree(weights, targets)
        del weights
        adapter_s, model = timed(lambda: PeftModel.from_pretrained(root, os.path.join(directory, "a")))
        merge_s, _ = timed(model.merge_adapter)
    # the copies for the comparison are no cost of PEFT's: they are made between two watches
    merged = {name: p.detach().clone() for name, p in model.named_parameters() if "base_layer" in name}
    n_held = peak.now() - peak.first - sum(t.numel() * t.element_size() for t in merged.values())
    with Peak() as peak_off:
        unmerge_s, _ = timed(model.unmerge_adapter)
    fresh = load_file(path)
    n_bytes = n_elements = n_changed = n_merged = 0
    for name, parameter in model.named_parameters():
        if "base_layer" in name:
            base = fresh[name.removeprefix("base_model.model.").replace(".base_layer", "")]
            n_merged += int((merged[name].view(torch.int16) != base.view(torch.int16)).sum())
            n_changed += int((parameter.view(torch.int16) != base.view(torch.int16)).sum())
            n_elements += base.numel()
            n_bytes += base.numel() * base.element_size()
    n_wrong = compare(merged, os.path.join(directory, "out.safetensors"))
    return {"load_s": load_s, "adapter_s": adapter_s, "merge_s": merge_s, "unmerge_s": unmerge_s, "n_bytes": n_bytes, "n_elements": n_elements,
            "n_merged": n_merged, "n_changed": n_changed, "n_wrong": n_wrong,
            "peak": max(peak.added, n_held + peak_off.added)}


def compare(merged, path):
    """Elements that are not what pageflip's merge, one rounding of an ordered chain, gives."""
    import torch
    from safetensors import safe_open

    n_wrong = 0
    with safe_open(path, framework="pt") as right:
        for name, tensor in merged.items():
            wanted = right.get_tensor(name.removeprefix("base_model.model.").replace(".base_layer", ""))
            n_wrong += int((tensor.view(torch.int16) != wanted.view(torch.int16)).sum())
    return n_wrong


def script_way(directory):
    """What is passed around as "merge_lora.py": all of the weights in memory, f32 products, one save."""
    import torch
    from safetensors.torch import load_file, save_file

    out = os.path.join(directory, "script.safetensors")
    with Peak() as peak:
        t0 = time.perf_counter()
        weights = load_file(os.path.join(directory, "weights.safetensors"))
        with open(os.path.join(directory, "a", "adapter_config.json"), encoding="utf-8") as config:
            c = json.load(config)
        adapter = load_file(os.path.join(directory, "a", "adapter_model.safetensors"))
        scale = c["lora_alpha"] / c["r"]
        for key in [k for k in adapter if k.endswith(".lora_A.weight")]:
            down, up = adapter[key].float(), adapter[key.replace("lora_A", "lora_B")].float()
            name = key.removeprefix("base_model.model.").replace(".lora_A", "")
            weights[name] = (weights[name].float() + scale * (up @ down)).to(torch.bfloat16)
        save_file(weights, out)
        descriptor = os.open(out, os.O_RDONLY)
        os.fsync(descriptor)  # pageflip's output is durable when it ends: so must this be
        os.close(descriptor)
        seconds = time.perf_counter() - t0
    os.remove(out)
    return {"seconds": seconds, "peak": peak.added}


def child(way, directory):
    done = subprocess.run([sys.executable, __file__, way, directory], check=True, stdout=subprocess.PIPE)
    return json.loads(done.stdout.splitlines()[-1])


def pageflip_json(pageflip, *args):
    done = subprocess.run([pageflip, *args, "--json", "--quiet"], check=True, stdout=subprocess.PIPE)
    return json.loads(done.stdout)


def warm(path):
    with open(path, "rb", buffering=0) as file:
        while file.read(1 << 24):
            pass


def main():
    pageflip, directory = sys.argv[1], sys.argv[2]
    weights, adapter, out = (os.path.join(directory, n) for n in ("weights.safetensors", "a", "out.safetensors"))
    n_file = os.path.getsize(weights)
    warm(weights)
    merge_s, merge = timed(lambda: pageflip_json(pageflip, "merge", "--model", weights, "--lora", adapter, "-o", out))
    warm(weights)
    peft = child("--peft", directory)
    os.remove(out)
    warm(weights)
    script = child("--script", directory)
    switch = pageflip_json(pageflip, "bench", "switch", "--model", weights, "--adapter-a", adapter, "--adapter-b", os.path.join(directory, "b"),
                           "--dir", directory, "--seconds", "1")
    ops = {op["op"]: op for op in switch["ops"]}
    report(n_file, merge_s, merge, peft, script, switch, ops)


def report(n_file, merge_s, merge, peft, script, switch, ops):
    merge_peak = merge["peak_anon_bytes"]
    effect, unmerge = ops["first set of a"]["panel_ms"] / 1e3, ops["unmerge"]["panel_ms"] / 1e3
    overlay_s = ops["overlay of a"]["ms"] / 1e3
    n_left = switch["elements_changed_after_unmerge"]
    rows = [
        ("merge into a file: seconds", script["seconds"], merge_s, "load-merge-save"),
        ("  GB/s of the file", n_file / GB / script["seconds"], n_file / GB / merge_s, ""),
        ("  peak anonymous MiB", script["peak"] / MIB, merge_peak / MIB, ""),
        ("merge in the process: seconds", peft["merge_s"], overlay_s, "merge_adapter; pageflip: to overlay complete"),
        ("  GB/s of merged weights", peft["n_bytes"] / GB / peft["merge_s"], peft["n_bytes"] / GB / overlay_s, ""),
        ("  seconds until it has effect", peft["merge_s"], effect, "pageflip: first merged panel"),
        ("  peak anonymous MiB, with loading", peft["peak"] / MIB, max(op["added_anon_bytes"] for op in switch["ops"]) / MIB, ""),
        ("unmerge: seconds", peft["unmerge_s"], unmerge, "unmerge_adapter"),
        ("  elements changed afterwards", peft["n_changed"], n_left, f"of {peft['n_elements']:,}"),
        ("elements unlike pageflip's merge", peft["n_wrong"], 0, f"of {peft['n_merged']:,} that merge_adapter changes"),
    ]
    print(f"{n_file / GB:.2f} GB of weights in the page cache, {peft['n_bytes'] / GB:.2f} GB of them merged\n")
    print(f"{'':36}{'they':>14}{'pageflip':>14}{'better by':>10}")
    for name, theirs, ours, note in rows:
        better = ours / theirs if "GB/s" in name else theirs / max(ours, 1e-12)
        ratio = f"{better:.3g}" if ours else "-"
        print(f"{name:36}{theirs:14.4g}{ours:14.4g}{ratio:>10}  {note}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    if sys.argv[1] == "--peft":
        print(json.dumps(peft_way(sys.argv[2])))
    elif sys.argv[1] == "--script":
        print(json.dumps(script_way(sys.argv[2])))
    else:
        main()
