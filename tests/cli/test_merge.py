"""merge: layout and bytes, refusals, --force, parts, and Ctrl-C, after which the same command continues."""
import contextlib
import fcntl
import json
import os
import pty
import shutil
import signal
import subprocess
import time
import unittest

from cli import MODEL, PAGEFLIP, SOURCE, WEIGHTS, Case, lora, pageflip, read, read_safetensors, write_safetensors

BLOCK = "transformer.transformer_blocks.0.attn1.to_q"


def files(top):
    """{relative path: bytes}"""
    found = {}
    for root, _, names in os.walk(top):
        for name in names:
            path = os.path.join(root, name)
            found[os.path.relpath(path, top)] = read(path)
    return found


def open_files(pid):
    """{descriptor: name}; what is closed meanwhile is left out"""
    top, found = f"/proc/{pid}/fd", {}
    for fd in os.listdir(top):
        with contextlib.suppress(FileNotFoundError):
            found[int(fd)] = os.readlink(os.path.join(top, fd))
    return found


class Merge(Case):
    def test_a_model_directory(self):
        out = self.path("out")
        doc = self.ok("merge", "--lora", "night", "-o", out, "--json")
        self.assertTrue(doc["complete"])
        self.assertFalse(doc["resumed"])
        for field in ("bytes_read", "bytes_written", "peak_anon_bytes", "seconds", "survival", "fraction_changed", "composition"):
            self.assertIn(field, doc)
        self.assertGreater(doc["bytes_written"], 5 << 20)
        self.assertGreater(doc["seconds"], 0)
        base, merged = files(MODEL), files(out)
        self.assertEqual(set(base), set(merged))
        self.assertEqual([name for name in base if base[name] != merged[name]], [WEIGHTS])
        golden = read_safetensors(os.path.join(SOURCE, "tests", "golden", "merged_night.safetensors"))[2]
        ours, theirs = read_safetensors(os.path.join(out, WEIGHTS))[2], read_safetensors(os.path.join(MODEL, WEIGHTS))[2]
        self.assertEqual(sum(ours[k] != theirs[k] for k in ours), doc["tensors_changed"])
        self.assertTrue(set(golden) <= set(ours))
        self.assertEqual(os.listdir(self.dir), ["out"])

    def test_text(self):
        result = self.ok("merge", "--lora", "turbo", "-o", self.path("out"))
        for label in ("changes", "survival", "composition", "output", "written", "memory"):
            self.assertRegex(result.out, rf"(?m)^{label} +\S")

    def test_one_file_and_threads(self):
        outs = []
        for i, threads in enumerate((1, 2, 7)):
            outs.append(self.path(f"{i}.safetensors"))
            self.ok("merge", "--model", os.path.join(MODEL, WEIGHTS), "--lora", "noto", "--lora", "turbo:-0.5", "-o", outs[i],
                    "--threads", threads)
        data = [read(out) for out in outs]
        self.assertEqual(data[0], data[1])
        self.assertEqual(data[0], data[2])

    def test_no_adapter_and_strength_zero_give_the_base(self):
        self.ok("merge", "-o", self.path("a"))
        self.ok("merge", "--lora", "turbo:0", "-o", self.path("b"))
        self.assertEqual(files(self.path("a")), files(MODEL))
        self.assertEqual(files(self.path("b")), files(MODEL))

    def test_an_index_by_every_name_of_it(self):
        index = "model.safetensors.index.json"
        header, _, data = read_safetensors(os.path.join(MODEL, WEIGHTS))
        names = list(header)
        os.makedirs(self.path("m", "sub"))
        for i in range(2):
            write_safetensors(self.path("m", f"model-0000{i + 1}-of-00002.safetensors"),
                              {k: (header[k]["dtype"], header[k]["shape"], data[k]) for k in names[i::2]})
        with open(self.path("m", index), "w", encoding="utf-8") as file:
            json.dump({"weight_map": {k: f"model-0000{i % 2 + 1}-of-00002.safetensors" for i, k in enumerate(names)}}, file)
        self.ok("merge", "--model", self.path("m", index), "--lora", "night", "-o", self.path("whole"))
        want = files(self.path("whole"))
        self.assertEqual(len(want), 3)
        for i, (cwd, model) in enumerate((("m", index), ("m", "./" + index), ("m/sub", "../" + index), (".", "m//" + index))):
            self.ok("merge", "--model", model, "--lora", "night", "-o", self.path(f"out{i}"), cwd=self.path(cwd))
            self.assertEqual(files(self.path(f"out{i}")), want, model)

    def test_f32(self):
        doc = self.ok("merge", "--lora", "noto", "--merge-dtype", "f32", "-o", self.path("out"), "--json")
        header = read_safetensors(self.path("out", WEIGHTS))[0]
        self.assertEqual(sum(t["dtype"] == "F32" for t in header.values()), doc["tensors_changed"])
        self.assertAlmostEqual(doc["survival"], 1, places=6)

    def test_an_existing_output_needs_force(self):
        out = self.path("out.safetensors")
        args = ["merge", "--model", os.path.join(MODEL, WEIGHTS), "--lora", "noto", "-o", out]
        with open(out, "w", encoding="utf-8") as file:
            file.write("mine")
        self.assertEqual(self.fails(1, f"'{out}'", *args)["code"], "exists")
        self.assertIn("only when forced (--force)", self.fails(1, "exists", *args)["message"])
        with open(out, encoding="utf-8") as file:
            self.assertEqual(file.read(), "mine")
        self.ok(*args, "--force")
        self.assertEqual(len(read_safetensors(out)[0]), len(read_safetensors(os.path.join(MODEL, WEIGHTS))[0]))

    def test_the_output_is_never_the_model(self):
        model, link, hard = self.path("m.safetensors"), self.path("link"), self.path("hard.safetensors")
        shutil.copy(os.path.join(MODEL, WEIGHTS), model)
        os.symlink("m.safetensors", link)
        os.link(model, hard)
        before = read(model)
        for out in (model, self.path(".", "m.safetensors"), link, hard, self.path("..", os.path.basename(self.dir), "m.safetensors")):
            error = self.fails(1, "pageflip: ", "merge", "--model", model, "--lora", "noto", "-o", out, "--force")
            self.assertEqual(error["code"], "invalid", error)
        self.assertEqual(read(model), before)
        tree = self.path("tree")
        shutil.copytree(MODEL, tree)
        os.symlink("tree", self.path("tree-link"))
        for out in (tree, tree + "/", self.path("tree-link")):
            error = self.fails(1, "pageflip: ", "merge", "--model", tree, "--lora", "noto", "-o", out, "--force")
            self.assertEqual(error["code"], "invalid", error)
        self.assertEqual(files(tree), files(MODEL))

    def test_unmatched_keys_refuse(self):
        path = write_safetensors(self.path("a.safetensors"), {**lora(BLOCK, 128, 128, scale=1), **lora(BLOCK + "q", 128, 128)})
        error = self.fails(1, BLOCK + "q.lora_A.weight", "merge", "--lora", path, "-o", self.path("out"))
        self.assertEqual(error["code"], "unmatched")
        self.assertIn("--allow-unmatched leaves them out", error["message"])
        self.assertFalse(os.path.exists(self.path("out")))
        error = self.fails(1, BLOCK + "q.lora_A.weight", "generate", "--class", "1", "--lora", path, "-o", self.path("x.png"))
        self.assertIn("--allow-unmatched leaves them out", error["message"])
        nothing = write_safetensors(self.path("b.safetensors"), lora(BLOCK + "q", 128, 128))
        for extra in ([], ["--allow-unmatched"]):  # which would not help
            error = self.fails(1, "nothing matches", "merge", "--lora", nothing, "-o", self.path("out"), *extra)
            self.assertNotIn("leaves them out", error["message"])
        doc = self.ok("merge", "--lora", path, "-o", self.path("out"), "--allow-unmatched", "--json")
        self.assertEqual((doc["keys_matched"], len(doc["keys_unmatched"]), doc["tensors_changed"]), (3, 3, 1))

    def test_parts(self):
        out, whole = self.path("out"), self.path("whole")
        self.ok("merge", "--lora", "noto", "-o", whole)
        doc = self.ok("merge", "--lora", "noto", "-o", out, "--part", "2/2", "--json")
        self.assertFalse(doc["complete"])
        self.assertFalse(os.path.exists(out))
        doc = self.ok("merge", "--lora", "noto", "-o", out, "--part", "1/2", "--json")
        self.assertTrue(doc["complete"])
        self.assertEqual(files(out), files(whole))

    def test_closed_streams_are_no_file_of_ours(self):
        out = self.path("out")
        os.mkdir(out + ".partial")
        with open(os.path.join(out + ".partial", "lock"), "wb") as lock:  # the merge waits for it, files open
            fcntl.flock(lock, fcntl.LOCK_EX)
            process = subprocess.Popen([PAGEFLIP, "merge", "--lora", "noto", "-o", out], preexec_fn=lambda: os.closerange(0, 3))
            self.addCleanup(process.kill)
            end = time.monotonic() + 120
            while not any(name.endswith("part.0") for name in open_files(process.pid).values()):
                self.assertLess(time.monotonic(), end)
                self.assertIsNone(process.poll())
                time.sleep(0.01)
            held = open_files(process.pid)
            self.assertEqual([held[fd] for fd in range(3)], ["/dev/null"] * 3)
        self.assertEqual(process.wait(120), 1)  # the report could not be written; the merge was
        self.assertEqual(len(files(out)), len(files(MODEL)))

    def test_the_name_of_another_kind(self):
        model = write_safetensors(self.path("m.safetensors"), {"blocks.0.w.weight": ("BF16", [8, 8], bytes(128))})
        for name in ("x.bin", "x.pt", "x.gguf", "x.safetensors.index.json"):
            self.fails(1, "end it in .safetensors", "merge", "--model", model, "-o", self.path(name))
        self.assertEqual(os.listdir(self.dir), ["m.safetensors"])

    def test_an_unwritable_place(self):
        self.fails(1, self.path("no", "dir"), "merge", "--lora", "noto", "-o", self.path("no", "dir", "out"))


class Interrupted(Case):
    def setUp(self):
        super().setUp()
        n, rank, n_blocks = 1024, 128, 24 if not os.environ.get("PF_SANITIZE") else 8
        self.model, self.lora = self.path("m.safetensors"), self.path("l.safetensors")
        noise = os.urandom(2 * n * n).replace(b"\x7f", b"\x3f").replace(b"\xff", b"\xbf")  # no infinities: bf16 of 0x7f80 and up
        write_safetensors(self.model, {f"blocks.{i}.w.weight": ("BF16", [n, n], b"\x00\x3c" * (n * n // 2) + noise[:n * n])
                                       for i in range(n_blocks)})
        tensors = {}
        for i in range(n_blocks):
            tensors.update(lora(f"blocks.{i}.w", n, n, rank, scale=1))
        write_safetensors(self.lora, tensors)
        self.out = self.path("out.safetensors")
        self.args = ["merge", "--model", self.model, "--lora", self.lora, "-o", self.out, "--threads", "1", "--json"]

    def interrupt(self):
        """Runs and sends SIGINT as soon as something of it is durable. None: it was done before."""
        journal = os.path.join(self.out + ".partial", "journal.0")  # a head of 32 bytes, then a record of what is durable
        # the plain kernel has the same bytes and is slow enough for a signal to meet it on any machine
        run = subprocess.Popen([PAGEFLIP, *self.args], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               env={**os.environ, "PF_ISA": "scalar"})
        while run.poll() is None:
            with contextlib.suppress(FileNotFoundError):
                if os.path.getsize(journal) > 32:
                    run.send_signal(signal.SIGINT)
                    break
            time.sleep(0.002)
        out, err = run.communicate(timeout=60)
        if run.returncode == 0:
            os.remove(self.out)
            return None
        return run.returncode, out.decode(), err.decode()

    def test_ctrl_c_leaves_nothing_and_the_next_run_continues(self):
        done = None
        for _ in range(5):
            done = done or self.interrupt()
        self.assertIsNotNone(done, "the merge was always faster than the signal")
        status, out, err = done
        self.assertEqual(status, 130, err)
        self.assertIn("interrupted", err)
        self.assertIn('"cancelled"', out)
        self.assertFalse(os.path.exists(self.out))
        doc = self.ok(*self.args)
        self.assertTrue(doc["complete"])
        self.assertTrue(doc["resumed"])
        self.assertLess(doc["bytes_written"], os.path.getsize(self.out))
        whole = self.path("whole.safetensors")
        self.ok("merge", "--model", self.model, "--lora", self.lora, "-o", whole, "--json")
        self.assertEqual(read(whole), read(self.out))
        self.assertEqual(sorted(os.listdir(self.dir)), ["l.safetensors", "m.safetensors", "out.safetensors", "whole.safetensors"])

    def test_a_kill_leaves_nothing_and_the_next_run_continues(self):
        done = pageflip(*self.args, env={"PF_FAULT": "kill@20"})
        self.assertEqual(done.status, -signal.SIGKILL, done.err)
        self.assertFalse(os.path.exists(self.out))
        doc = self.ok(*self.args)
        self.assertTrue(doc["complete"])
        self.assertTrue(doc["resumed"])
        self.assertEqual(sorted(os.listdir(self.dir)), ["l.safetensors", "m.safetensors", "out.safetensors"])
        base, merged = read_safetensors(self.model)[2], read_safetensors(self.out)[2]
        self.assertEqual(sum(base[name] != merged[name] for name in base), doc["tensors_changed"])

    def test_a_full_disk_is_said(self):
        error = pageflip(*self.args, env={"PF_FAULT": "enospc@12"})
        self.assertEqual(error.status, 1)
        self.assertEqual(error.json["error"]["code"], "nospace")
        self.assertFalse(os.path.exists(self.out))

    def test_the_bar_is_drawn_on_a_terminal_only(self):
        ours, theirs = pty.openpty()
        run = subprocess.Popen([PAGEFLIP, *self.args], stdout=subprocess.PIPE, stderr=theirs)
        os.close(theirs)
        text = b""
        while True:
            try:
                data = os.read(ours, 4096)
            except OSError:
                break
            if not data:
                break
            text += data
        run.communicate(timeout=60)
        os.close(ours)
        self.assertEqual(run.returncode, 0, text)
        self.assertRegex(text.decode(), r"\[#*\.*\] +\d+ %")
        self.assertRegex(text.decode(), r"B/s +\d+:\d\d left")
        self.assertTrue(text.endswith(b"\r\x1b[K"))  # wiped at the end
        self.assertNotIn("\r", pageflip(*self.args, "--force").err)


if __name__ == "__main__":
    unittest.main()
