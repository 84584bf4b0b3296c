"""bench: synthetic files that the other commands take, and measurements that print what they promise. No time is asserted."""
import os
import shutil
import tempfile
import unittest

from cli import SOURCE, Case, read, read_safetensors


class Make(Case):
    def make(self, *args):
        return self.ok("bench", "make", *args, "--json")

    def test_a_model_and_its_adapters_fit_each_other(self):
        model = self.path("model")
        doc = self.make("--shape", "emoji", "--scale", "0.25", "--seed", "1", model)
        self.assertEqual((doc["what"], doc["shape"], doc["output"]), ("checkpoint", "emoji", model))
        self.assertEqual(self.ok("inspect", model, "--json")["n_layers"], 3)
        digests = set()
        for dialect, family in (("peft", "peft"), ("diffusers", "diffusers"), ("kohya", "kohya"), ("native", "native")):
            out = self.path(dialect)
            doc = self.make("--shape", "emoji", "--scale", "0.25", "--rank", "4", "--dialect", dialect, out)
            self.assertEqual(doc["what"], "adapter")
            seen = self.ok("inspect", out, "--json")
            self.assertEqual((seen["family"], seen["dialect"], seen["rank"]), ("lora", family, {"min": 4, "max": 4}))
            plan = self.ok("plan", "--model", model, "--lora", out, "--json")
            self.assertEqual((plan["keys_unmatched"], plan["tensors_changed"]), ([], doc["n_targets"]))
            digests.add(seen["digest"])
        self.assertEqual(len(digests), 4)
        self.ok("generate", "--model", model, "--lora", self.path("kohya"), "--class", "1", "--steps", "1", "-o", self.path("x.png"))

    def test_the_bytes_depend_on_the_seed_alone(self):
        datas = []
        for i, args in enumerate((["--threads", "1"], ["--threads", "2"], ["--seed", "5"])):
            out = self.path(f"{i}.safetensors")
            self.make("--shape", "emoji", "--scale", "0.1", "--rank", "2", "--dialect", "kohya", *args, out)
            datas.append(read(out))
        self.assertEqual(datas[0], datas[1])
        self.assertNotEqual(datas[0], datas[2])

    def test_options_of_adapters(self):
        out = self.path("a.safetensors")
        self.make("--shape", "emoji", "--scale", "0.1", "--rank", "2", "--dialect", "kohya", "--dtype", "BF16", "--alpha", "1", out)
        self.assertEqual({t["dtype"] for n, t in read_safetensors(out)[0].items() if "lora" in n and "alpha" not in n}, {"BF16"})
        self.assertEqual(self.ok("inspect", out, "--json")["scale"], {"min": 0.5, "max": 0.5})

    def test_errors(self):
        out = self.path("x")
        for text, *args in (("option '--shape' is missing", out), ("takes one of h3|dit|emoji, not 'sdxl'", "--shape", "sdxl", out),
                            ("OUT is missing", "--shape", "emoji"), ("'--scale' must be above 0", "--shape", "emoji", "--scale", "0", out),
                            ("give --rank R", "--shape", "emoji", "--dialect", "peft", out),
                            ("takes one of peft|diffusers|kohya|native", "--shape", "emoji", "--rank", "1", "--dialect", "x", out),
                            ("whole number from 1 to 4096", "--shape", "emoji", "--rank", "0", out)):
            self.assertEqual(self.fails(2, text, "bench", "make", *args)["code"], "usage")
        os.mkdir(out)
        self.assertEqual(self.fails(1, "exists", "bench", "make", "--shape", "emoji", "--scale", "0.1", out)["code"], "exists")
        self.fails(2, "did you mean 'bench make'?", "bench", "mkae")
        self.fails(2, "'bench' needs a second word: make, merge, read, memory, stream, switch", "bench")


class Measure(Case):
    def test_merge(self):
        doc = self.ok("bench", "merge", "--rows", "64", "--cols", "64", "--ranks", "3,8", "--reps", "1", "--threads", "2", "--json")
        self.assertEqual([run["threads"] for run in doc["runs"]], [1, 2])
        for run in doc["runs"]:
            self.assertEqual([r["rank"] for r in run["ranks"]], [3, 8])
            for field in ("memcpy_gb_s", "peak_gflop_s", "ratio_geomean"):
                self.assertGreater(run[field], 0)
            self.assertGreater(run["ranks"][0]["sgemm_gflop_s"], 0)
        text = self.ok("bench", "merge", "--rows", "64", "--cols", "64", "--ranks", "3", "--reps", "1", "--threads", "1").out
        self.assertRegex(text, r"GFLOP/s|gflop")
        self.assertEqual(self.fails(2, "option '--ranks' takes", "bench", "merge", "--ranks", "3,x")["code"], "usage")
        self.fails(2, "option '--ranks' takes", "bench", "merge", "--ranks", "3,")

    def test_read(self):
        for args in ([], ["--lora", "noto"]):
            doc = self.ok("bench", "read", *args, "--reps", "1", "--threads", "1", "--json")
            for field in ("plain_gb_s", "native_gb_s", "f32_gb_s", "native_ratio"):
                self.assertGreater(doc[field], 0)
        self.assertRegex(self.ok("bench", "read", "--reps", "1").out, "GB/s")
        self.assertLess(self.ok("bench", "read", "--reps", "1", "--limit", "1M", "--json")["bytes"], 2000000)
        self.fails(2, "strength is not finite", "bench", "read", "--lora", "noto:nan")


class Engine(Case):
    def test_switch_on_the_bundled_model(self):
        model, work = self.path("model"), self.path("work")  # a copy: other tests have the files of the bundled model mapped
        shutil.copytree(os.path.join(SOURCE, "data", "emoji-dit"), model)
        os.mkdir(work)
        doc = self.ok("bench", "switch", "--model", model, "--adapter-a", "noto", "--adapter-b", "turbo", "--reps", "2", "--seconds", "0.2",
                      "--dir", work, "--json")
        ops = {op["op"]: op for op in doc["ops"]}
        self.assertEqual(len(ops), 10)
        self.assertEqual(ops["first set of a"]["way"], "stream")
        self.assertGreater(ops["first set of a"]["panel_ms"], 0)
        self.assertGreater(ops["first set of a"]["merged_panels"], 0)
        self.assertGreater(ops["overlay of a"]["written_bytes"], 1000000)
        self.assertNotIn("panel_ms", ops["set a again"])
        self.assertEqual((ops["back to a"]["way"], ops["back to a"]["merged_panels"]), ("overlay", 0))
        self.assertEqual((ops["switch to b"]["way"], ops["unmerge"]["way"], ops["unmerge"]["merged_panels"]), ("stream", "base", 0))
        self.assertEqual(doc["elements_changed_after_unmerge"], 0)
        start = doc["second_start"]
        self.assertEqual((start["way"], start["adoptions"], start["merged_panels"]), ("overlay", 1, 0))
        self.assertEqual((doc["warm_start"]["adoptions"], doc["warm_start"]["merged_panels"]), (1, 0))
        self.assertTrue(doc["load"]["is_drawing"])
        for when in ("before", "streamed", "during", "after"):
            self.assertGreater(doc["load"][when]["passes_s"], 0)
        for name, bound in doc["bounds"].items():
            self.assertTrue(bound > 0 or (name == "disk_read_gb_s" and not doc["is_cold"]), name)
        self.assertEqual(os.listdir(work), [])

    def test_switch_with_noise_that_fits(self):
        out = self.ok("bench", "switch", "--model", os.path.join(SOURCE, "data", "emoji-dit"), "--rank", "4", "--reps", "1", "--seconds", "0.1",
                      "--dir", self.dir).out
        for text in ("8 layers change", "first set of a", "second start", "drawing pictures", "storage reads"):
            self.assertIn(text, out)

    def test_switch_errors(self):
        for text, *args in (("belong together", "--adapter-a", "noto"), ("'--scale' must be above 0", "--scale", "0"),
                            ("leave out '--model'", "--scale", "1", "--model", "x"), ("'--seconds' must be", "--seconds", "0"),
                            ("leave out '--adapter-a'", "--rank", "2", "--adapter-a", "noto", "--adapter-b", "turbo")):
            self.fails(2, text, "bench", "switch", *args)
        self.fails(1, "/nowhere", "bench", "switch", "--model", "/nowhere", "--dir", self.dir)
        self.assertEqual(os.listdir(self.dir), [])

    def test_stream(self):
        self.dir = tempfile.mkdtemp(prefix="pf-cli-", dir="/var/tmp")  # a temp dir in memory would never be read from storage
        self.addCleanup(shutil.rmtree, self.dir, ignore_errors=True)
        doc = self.ok("bench", "stream", "--size", "140M", "--limit", "70M", "--passes", "2", "--no-group", "--dir", self.dir, "--json")
        self.assertIsNone(doc["group"])
        self.assertEqual(len(doc["plain"]["passes"]), 2)
        self.assertGreater(doc["plain"]["read_fraction"], 0.9)
        self.assertLess(doc["stream"]["read_fraction"], doc["plain"]["read_fraction"])
        self.assertGreater(doc["stream"]["kept_bytes"], 0)
        self.assertEqual(os.listdir(self.dir), [])
        self.fails(1, "fit into a limit", "bench", "stream", "--size", "100M", "--limit", "200M", "--dir", self.dir)
        self.fails(2, "leave out '--model'", "bench", "stream", "--size", "100M", "--model", "x")

    def test_memory(self):
        doc = self.ok("bench", "memory", "--h3-scale", "0.001", "--dit-scale", "0.005", "--limit", "900M", "--rank", "4", "--reps", "1",
                      "--dir", self.dir, "--json")
        self.assertEqual([op["op"] for op in doc["ops"]], ["load two adapters", "first set", "build the overlay", "switch there and back"])
        self.assertTrue(doc["is_within"])
        self.assertGreater(doc["passes"], 0)
        self.assertEqual(os.listdir(self.dir), [])
        self.fails(1, "at least 256", "bench", "memory", "--limit", "1M", "--dir", self.dir)
        self.fails(2, "must be above 0", "bench", "memory", "--h3-scale", "0")


if __name__ == "__main__":
    unittest.main()
