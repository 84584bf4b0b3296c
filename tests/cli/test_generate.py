"""generate: PNGs, JSON fields, and what a picture does and does not depend on. One or two steps: quick, not pretty."""
import json
import os
import shutil
import signal
import struct
import unittest

from cli import MODEL, Case, draws, read

QUICK = ["--steps", "1", "--guidance-scale", "1"]


def png_size(path):
    head = read(path)[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n", head
    return struct.unpack(">II", head[16:24])


class Generate(Case):
    def draw(self, name, *args):
        path = self.path(name)
        doc = self.ok("generate", *QUICK, "-o", path, "--json", *args)
        self.assertEqual(doc["output"], path)
        return read(path), doc

    def test_fields(self):
        _, doc = self.draw("x.png", "--prompt", "a cat, please", "--seed", "7")
        for field in ("composition", "seconds", "peak_anon_bytes", "images", "bytes_read", "weight_bytes", "activation_bytes"):
            self.assertIn(field, doc)
        self.assertEqual(doc["images"], [{"index": 0, "class": 25, "name": "cat", "path": self.path("x.png")}])
        self.assertEqual(doc["seed"], 7)
        self.assertGreater(doc["seconds"], 0)
        self.assertGreater(doc["peak_anon_bytes"], 1 << 20)
        self.assertGreater(doc["weight_bytes"], 5 << 20)
        self.assertEqual(png_size(self.path("x.png")), (32, 32))

    def test_text(self):
        result = self.ok("generate", *QUICK, "--class", "25", "-o", self.path("x.png"))
        for label in ("output", "seconds", "memory", "read", "composition"):
            self.assertRegex(result.out, rf"(?m)^{label} +\S")
        self.assertEqual(result.err, "")

    def test_prompt_and_class_draw_the_same(self):
        self.assertEqual(self.draw("a.png", "--prompt", "cat")[0], self.draw("b.png", "--class", "25")[0])

    def test_the_picture_depends_on_seed_class_steps_guidance_and_adapters(self):
        base, plain = self.draw("a.png", "--class", "25")
        pictures = {base}
        for i, args in enumerate((["--seed", "1"], ["--lora", "noto"], ["--lora", "turbo:0.5"])):
            data, doc = self.draw(f"b{i}.png", "--class", "25", *args)
            pictures.add(data)
            self.assertEqual(doc["composition"] == plain["composition"], "--lora" not in args)
        pictures.add(self.draw("c.png", "--class", "24")[0])
        for i, args in enumerate((["--steps", "2", "--guidance-scale", "1"], ["--steps", "1", "--guidance-scale", "3"])):
            self.ok("generate", "--class", "25", *args, "-o", self.path(f"d{i}.png"))
            pictures.add(read(self.path(f"d{i}.png")))
        self.assertEqual(len(pictures), 7)

    def test_the_picture_does_not_depend_on_threads_batch_or_a_zero_adapter(self):
        base = self.draw("a.png", "--class", "3", "--n", "3")[0]
        self.assertEqual(self.draw("b.png", "--class", "3", "--n", "3", "--threads", "1")[0], base)
        self.assertEqual(self.draw("c.png", "--class", "3", "--n", "3", "--batch", "1", "--threads", "2")[0], base)
        self.assertEqual(self.draw("d.png", "--class", "3", "--n", "3", "--lora", "noto:0")[0], base)

    def test_a_merged_checkpoint_draws_what_the_adapter_draws(self):
        self.ok("merge", "--lora", "noto", "-o", self.path("merged"))
        self.assertEqual(self.draw("a.png", "--class", "9", "--model", self.path("merged"))[0],
                         self.draw("b.png", "--class", "9", "--lora", "noto")[0])

    def test_sheets(self):
        _, doc = self.draw("n.png", "--class", "1", "--n", "10", "--zoom", "2")
        self.assertEqual(png_size(self.path("n.png")), (8 * 32 * 2, 2 * 32 * 2))
        self.assertEqual(len(doc["images"]), 10)
        _, doc = self.draw("grid.png", "--grid")
        self.assertEqual(png_size(self.path("grid.png")), (256, 256))
        self.assertEqual([image["class"] for image in doc["images"]], list(range(64)))

    def test_default_names(self):
        doc = self.ok("generate", *QUICK, "--prompt", "cat", "--seed", "3", "--json", cwd=self.dir)
        self.assertEqual(doc["output"], "cat-3.png")
        self.assertEqual(os.listdir(self.dir), ["cat-3.png"])

    def test_ctrl_c(self):
        run, rest = draws("--grid", "--steps", "10000", "-o", self.path("x.png"), "--json")  # before it draws it would end without a word
        run.send_signal(signal.SIGINT)
        err = rest()
        out, _ = run.communicate(timeout=60)
        self.assertEqual(run.returncode, 130)
        self.assertIn("interrupted: '" + self.path("x.png") + "' was not written", err)
        self.assertEqual(json.loads(out)["error"]["code"], "cancelled")
        self.assertEqual(os.listdir(self.dir), [])

    def test_errors(self):
        out = ["-o", self.path("x.png")]
        self.assertEqual(self.fails(1, "class 64 does not exist; the model has 0 to 63", "generate", "--class", "64", *out)["code"],
                         "notfound")
        self.assertEqual(self.fails(1, "zebrafish", "generate", "--prompt", "zebrafish", *out)["code"], "notfound")
        self.fails(1, self.path("no", "x.png"), "generate", *QUICK, "--class", "1", "-o", self.path("no", "x.png"))
        os.symlink("/dev/null", self.path("null"))
        self.fails(1, "null' is neither a file nor a directory", "generate", *QUICK, "--class", "1", "-o", self.path("null"))
        self.assertEqual(os.listdir(self.dir), ["null"])
        self.assertEqual(os.readlink(self.path("null")), "/dev/null")
        os.unlink(self.path("null"))
        for data in (b"precious", b"\x89PNG\r\n"):
            with open(out[1], "wb") as file:
                file.write(data)
            self.assertEqual(self.fails(1, "is no PNG picture", "generate", *QUICK, "--class", "1", *out)["code"], "exists")
            self.assertEqual(read(out[1]), data)
        os.truncate(out[1], 0)
        for _ in range(2):  # an empty file, then a picture
            self.ok("generate", *QUICK, "--class", "1", *out)
        os.unlink(out[1])
        shutil.copy(os.path.join(MODEL, "transformer", "diffusion_pytorch_model.safetensors"), self.path("alone.safetensors"))
        self.fails(1, "config", "generate", "--model", self.path("alone.safetensors"), "--class", "1", *out)
        self.assertEqual(os.listdir(self.dir), ["alone.safetensors"])


if __name__ == "__main__":
    unittest.main()
