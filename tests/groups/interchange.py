"""What pageflip writes, opened with the safetensors package; what the package writes, opened with pageflip. tests/groups/python runs it."""
import glob
import json
import os
import unittest

import numpy as np
import safetensors
from safetensors.numpy import load_file, save_file

from cli import MODEL, SOURCE, WEIGHTS, Case, read

BASE = os.path.join(MODEL, WEIGHTS)
BLOCK = "transformer_blocks.3.attn1.to_q.weight"


def theirs(path):
    """{name: (dtype, shape, bytes)} as the package sees the file; its deserialize takes every dtype, numpy does not know bf16."""
    return {name: (t["dtype"], list(t["shape"]), bytes(t["data"])) for name, t in safetensors.deserialize(read(path))}


def values(tensor):
    """A BF16 or F32 tensor as f64."""
    dtype, shape, data = tensor
    if dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64).reshape(shape)
    assert dtype == "F32", dtype
    return np.frombuffer(data, "<f4").astype(np.float64).reshape(shape)


def to_bf16(x):
    """Rounded once, to nearest, ties to even, from f64; as bits."""
    exponent = np.frexp(x)[1]
    ulp = np.ldexp(1.0, np.maximum(exponent - 8, -133))
    return (np.rint(x / ulp) * ulp).astype(np.float32).view(np.uint32) >> 16


class Written(Case):
    """Files of ours, opened there."""

    def merged(self, name, *args):
        out = self.path(name)
        self.ok("merge", "--model", BASE, "-o", out, *args)
        return theirs(out)

    def test_a_merged_file(self):
        base, golden = theirs(BASE), theirs(os.path.join(SOURCE, "tests", "golden", "merged_night.safetensors"))
        merged = self.merged("m.safetensors", "--lora", "night")
        self.assertEqual(set(base), set(merged))
        n, n_other = 0, 0
        for name, (dtype, shape, data) in merged.items():
            self.assertEqual((dtype, shape), base[name][:2])
            if name not in golden:
                self.assertEqual(data, base[name][2], name)
                continue
            want, got = values(golden[name]), values(merged[name])
            n, n_other = n + want.size, n_other + np.count_nonzero(want != got)
            # one unit in the last place; where W and delta cancel, the rounding of the delta's sum
            self.assertTrue((np.abs(want - got) <= np.abs(want) / 128 + 2**-22 * np.abs(values(base[name]))).all(), name)
        self.assertGreater(n, 1_000_000)
        self.assertLess(n_other, n / 10_000)  # a tie that f32 sees otherwise than f64

    def test_a_file_merged_to_f32(self):
        out = self.path("m.safetensors")
        self.ok("merge", "--model", BASE, "--lora", "noto:0.5", "--merge-dtype", "f32", "-o", out)
        with safetensors.safe_open(out, framework="np") as file:
            whole = file.get_tensor(BLOCK)
            rows = file.get_slice(BLOCK)[5:9]
        self.assertEqual(whole.dtype, np.float32)
        self.assertTrue(np.array_equal(whole[5:9], rows))
        rounded = self.merged("r.safetensors", "--lora", "noto:0.5")[BLOCK]
        same = to_bf16(whole.astype(np.float64)).ravel() == np.frombuffer(rounded[2], "<u2")
        self.assertTrue(same.all())

    def test_overlay_files(self):
        cache, merged = self.path("cache"), self.merged("m.safetensors", "--lora", "turbo")
        self.ok("generate", "--class", 0, "--steps", 1, "--way", "overlay", "--cache-dir", cache, "--lora", "turbo", "-o",
                self.path("x.png"))
        files = glob.glob(os.path.join(cache, "**", "*.safetensors"), recursive=True)
        self.assertEqual(len(files), 8)  # a layer each
        n = 0
        for path in files:
            with safetensors.safe_open(path, framework="np") as file:
                self.assertTrue(file.metadata())
            for name, tensor in theirs(path).items():
                name = name if name in merged else name.removeprefix("transformer.")
                self.assertEqual(tensor, merged[name], name)
                n += 1
        base = theirs(BASE)
        self.assertEqual(n, sum(base[name] != merged[name] for name in base))

    def test_bench_files(self):
        for shape, args in {"emoji": (), "dit": ("--scale", 0.001)}.items():
            out = self.path(shape)
            self.ok("bench", "make", "--shape", shape, *args, out)
            files = glob.glob(os.path.join(out, "**", "*.safetensors"), recursive=True) if os.path.isdir(out) else [out]
            self.assertTrue(files)
            self.assertTrue(all(theirs(path) for path in files))


class Read(Case):
    """Files of theirs, opened here."""

    def test_dtypes_and_shapes(self):
        rng = np.random.default_rng(7)
        path = self.path("all.safetensors")
        tensors = {str(np.dtype(t)): rng.integers(0, 2, (3, 5)).astype(t)
                   for t in ("f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "?")}
        tensors |= {"scalar": np.array(2.5, "f4"), "none": np.zeros((0, 4), "f2"), "deep": rng.random((2, 1, 3, 1, 2))}
        save_file(tensors, path, metadata={"format": "np", "ключ": "värde \" \\ \n"})
        self.ok("inspect", path)
        self.ok("merge", "--model", path, "-o", self.path("copy.safetensors"))
        self.assertEqual(theirs(self.path("copy.safetensors")), theirs(path))
        with safetensors.safe_open(self.path("copy.safetensors"), framework="np") as file:
            self.assertEqual(file.metadata()["ключ"], "värde \" \\ \n")

    def test_an_adapter(self):
        rng = np.random.default_rng(8)
        path, rank = self.path("a.safetensors"), 5
        a, b = rng.normal(0, 0.1, (rank, 128)).astype("f4"), rng.normal(0, 0.1, (128, rank)).astype("f2")
        module = "transformer." + BLOCK.removesuffix(".weight")
        save_file({module + ".lora_A.weight": a, module + ".lora_B.weight": b, module + ".alpha": np.array(2.0, "f4")}, path)
        self.ok("merge", "--model", BASE, "--lora", path + ":-1.5", "-o", self.path("m.safetensors"))
        base, merged = theirs(BASE), theirs(self.path("m.safetensors"))
        self.assertEqual([name for name in base if base[name] != merged[name]], [BLOCK])
        scale = float(np.float32(-1.5 * 2 / rank))
        want = values(base[BLOCK]) + scale * (b.astype("f8") @ a.astype("f8"))
        got = np.frombuffer(merged[BLOCK][2], "<u2").reshape(want.shape)
        self.assertLess(np.count_nonzero(got != to_bf16(want)), want.size / 1000)
        self.assertLess(np.abs(values(merged[BLOCK]) - want).max(), 0.01 * np.abs(want).max())

    def test_a_sharded_set(self):
        model, out = self.path("model"), self.path("out")
        os.mkdir(model)
        tensors = {f"blocks.{i}.{k}.weight": np.random.default_rng(i).normal(0, 1, (16, 8)).astype("f4") for i in range(6) for k in "ab"}
        where = {name: f"m-{1 + i // 5:05}-of-00003.safetensors" for i, name in enumerate(tensors)}
        for shard in set(where.values()):
            save_file({name: tensors[name] for name in tensors if where[name] == shard}, os.path.join(model, shard))
        index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": where}
        with open(os.path.join(model, "m.safetensors.index.json"), "w", encoding="utf-8") as file:
            json.dump(index, file)
        one, lora = self.path("one.safetensors"), self.path("lora.safetensors")
        save_file(tensors, one)
        save_file({"blocks.4.b.lora_A.weight": np.ones((1, 8), "f4"), "blocks.4.b.lora_B.weight": np.ones((16, 1), "f4")}, lora)
        self.ok("merge", "--model", model, "--lora", lora, "-o", out)
        self.ok("merge", "--model", one, "--lora", lora, "-o", self.path("merged.safetensors"))
        with open(os.path.join(out, "m.safetensors.index.json"), encoding="utf-8") as file:
            self.assertEqual(json.load(file)["weight_map"], where)
        together = {name: t for shard in set(where.values()) for name, t in load_file(os.path.join(out, shard)).items()}
        merged = load_file(self.path("merged.safetensors"))
        self.assertEqual(set(together), set(tensors))
        for name, tensor in tensors.items():
            self.assertTrue(np.array_equal(together[name], merged[name]))
            self.assertTrue(np.array_equal(together[name], tensor + 1 if name == "blocks.4.b.weight" else tensor))


if __name__ == "__main__":
    unittest.main(verbosity=2)
