"""Anonymous memory of the two large jobs, bounded by panels and scratch, never by model or adapter: weights of real geometry, as small
as they come. Not run with sanitizers, which have memory of their own."""
import os
import unittest

from cli import Case

BOUND = 64 << 20


class Memory(Case):
    def test_merging_h3_takes_64_mib_whatever_its_size(self):
        model, lora, out = self.path("h3.safetensors"), self.path("lora.safetensors"), self.path("out.safetensors")
        scale = ["--shape", "h3", "--scale", "0.02"]
        self.ok("bench", "make", *scale, model, "--json")
        self.ok("bench", "make", *scale, "--rank", "64", lora, "--json")
        doc = self.ok("merge", "--model", model, "--lora", lora, "-o", out, "--json")
        self.assertEqual(os.path.getsize(out), os.path.getsize(model))
        self.assertEqual(doc["tensors_changed"], 8)
        self.assertLessEqual(doc["peak_anon_bytes"], BOUND)

    def test_drawing_with_a_large_dit_takes_64_mib_beside_activations(self):
        model = self.path("dit")
        self.ok("bench", "make", "--shape", "dit", "--scale", "0.06", model, "--json")
        doc = self.ok("generate", "--model", model, "--class", "1", "--steps", "1", "-o", self.path("x.png"), "--json")
        self.assertLessEqual(doc["peak_anon_bytes"] - doc["activation_bytes"], BOUND)


if __name__ == "__main__":
    unittest.main()
