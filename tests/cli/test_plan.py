"""plan: what would change, unmatched keys with the nearest names, whether merge would refuse, estimates; nothing is written."""
import fcntl
import os
import pty
import struct
import subprocess
import termios
import unittest

from cli import MODEL, PAGEFLIP, WEIGHTS, Case, lora, read_safetensors, write_safetensors

BLOCK = "transformer.transformer_blocks.0.attn1.to_q"


class Plan(Case):
    def test_fields(self):
        doc = self.ok("plan", "--lora", "turbo:0.5", "--lora", "noto", "--json")
        header, _, data = read_safetensors(os.path.join(MODEL, WEIGHTS))
        keys = [len(read_safetensors(os.path.join(MODEL, "..", "adapters", f"{name}.safetensors"))[0]) for name in ("turbo", "noto")]
        self.assertEqual(doc["keys_matched"], sum(keys))
        self.assertEqual((doc["keys_unmatched"], doc["nearest"], doc["merge_refused"]), ([], {}, False))
        self.assertTrue(0 < doc["tensors_changed"] < len(header))
        self.assertEqual(doc["layers_changed"], 8)
        self.assertTrue(0 < doc["bytes_changed"] < sum(map(len, data.values())))
        self.assertTrue(0 < doc["survival"] <= 1.01)
        self.assertTrue(0 < doc["fraction_changed"] <= 1)
        self.assertRegex(doc["composition"], "^[0-9a-f]{32}$")
        self.assertEqual(doc["estimate"]["disk_bytes"], sum(map(len, data.values())))
        self.assertGreater(doc["estimate"]["memory_bytes"], 100000)
        self.assertGreater(doc["estimate"]["seconds"], 0)
        self.assertEqual([a["strength"] for a in doc["adapters"]], [0.5, 1])
        self.assertEqual(set(doc["adapters"][0]["kinds"]), {"lora"})

    def test_text(self):
        result = self.ok("plan", "--lora", "turbo")
        for label in ("model", "adapters", "keys", "changes", "survival", "composition", "disk", "memory", "time"):
            self.assertRegex(result.out, rf"(?m)^{label} +\S")
        self.assertNotIn("would refuse", result.out)

    def test_merge_dtype_f32_doubles_changed_bytes_and_loses_nothing(self):
        base = self.ok("plan", "--lora", "noto", "--json")
        f32 = self.ok("plan", "--lora", "noto", "--merge-dtype", "f32", "--json")
        self.assertEqual(f32["bytes_changed"], 2 * base["bytes_changed"])
        self.assertEqual(f32["estimate"]["disk_bytes"], base["estimate"]["disk_bytes"] + base["bytes_changed"])
        self.assertAlmostEqual(f32["survival"], 1, places=6)
        self.assertNotEqual(f32["composition"], base["composition"])

    def test_order_does_not_matter_and_strength_does(self):
        one = self.ok("plan", "--lora", "turbo", "--lora", "noto", "--json")["composition"]
        self.assertEqual(one, self.ok("plan", "--lora", "noto", "--lora", "turbo", "--json")["composition"])
        self.assertNotEqual(one, self.ok("plan", "--lora", "noto", "--lora", "turbo:0.9", "--json")["composition"])

    def test_no_adapter_and_strength_zero_change_nothing(self):
        doc = self.ok("plan", "--json")
        self.assertEqual((doc["tensors_changed"], doc["bytes_changed"], doc["keys_matched"]), (0, 0, 0))
        doc = self.ok("plan", "--lora", "turbo:0", "--json")
        self.assertEqual((doc["tensors_changed"], doc["bytes_changed"]), (0, 0))

    def test_an_adapter_of_zeros_is_remarked_on(self):
        path = write_safetensors(self.path("a.safetensors"), lora(BLOCK, 128, 128, scale=0))
        doc = self.ok("plan", "--lora", path, "--json")
        self.assertEqual(doc["tensors_changed"], 0)
        self.assertRegex("".join(doc["notes"]), "a.safetensors: warning: it adds nothing: .* zeros")

    def test_unmatched_keys_are_listed_with_the_nearest_name(self):
        tensors = {**lora(BLOCK, 128, 128, scale=1, alpha=None), **lora(BLOCK + "q", 128, 128, alpha=None)}
        path = write_safetensors(self.path("a.safetensors"), tensors)
        doc = self.ok("plan", "--lora", path, "--json")
        self.assertEqual(doc["keys_matched"], 2)
        self.assertEqual(sorted(doc["keys_unmatched"]), sorted(BLOCK + f"q.lora_{x}.weight" for x in "AB"))
        self.assertEqual(sorted(doc["nearest"]), sorted(doc["keys_unmatched"]))
        self.assertIn("transformer_blocks.0.attn1.to_q", doc["nearest"][BLOCK + "q.lora_A.weight"])
        self.assertTrue(doc["merge_refused"])
        self.assertFalse(self.ok("plan", "--lora", path, "--allow-unmatched", "--json")["merge_refused"])
        text = self.ok("plan", "--lora", path).out
        self.assertIn(BLOCK + "q.lora_A.weight (nearest: ", text)
        self.assertIn("would refuse: 2 keys match nothing; --allow-unmatched", text)

    def test_nothing_matched_is_a_failure(self):
        path = write_safetensors(self.path("a.safetensors"), lora("transformer.some.thing.else", 8, 8))
        self.assertEqual(self.fails(1, "transformer.some.thing.else", "plan", "--lora", path)["code"], "unmatched")

    def test_small_changes_are_warned_about(self):
        path = write_safetensors(self.path("a.safetensors"), lora(BLOCK, 128, 128, scale=2e-6))
        result = self.ok("plan", "--lora", path)
        self.assertRegex(result.err, r"(?m)^pageflip: warning: only \d+ % of the change survives rounding .*--merge-dtype f32")
        self.assertLess(self.ok("plan", "--lora", path, "--json")["survival"], 0.9)
        self.assertEqual(self.ok("plan", "--quiet", "--lora", path).err, "")
        self.assertNotIn("survives", self.ok("plan", "--lora", path, "--merge-dtype", "f32").err)

    def test_notes_are_shown(self):
        path = write_safetensors(self.path("a.safetensors"), lora(BLOCK, 128, 128, scale=1, alpha=None))
        self.assertIn("pageflip: note: a.safetensors: no alpha", self.ok("plan", "--lora", path).err)
        self.assertIn("no alpha", "".join(self.ok("plan", "--lora", path, "--json")["notes"]))
        self.assertIn("no alpha", "".join(self.ok("inspect", path, "--json")["odd"]))

    def test_alpha_and_target(self):
        doc = self.ok("plan", "--lora", "noto:1,alpha=8,target=transformer", "--json")
        self.assertEqual((doc["adapters"][0]["alpha"], doc["adapters"][0]["target"]), (8, "transformer"))
        self.assertNotEqual(doc["composition"], self.ok("plan", "--lora", "noto", "--json")["composition"])
        self.fails(1, "text_encoder", "plan", "--lora", "noto,target=text_encoder")

    def test_a_narrow_terminal_gets_short_lines(self):
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 50, 0, 0))
        run = subprocess.Popen([PAGEFLIP, "inspect", "noto", "--model", MODEL], stdout=theirs, stderr=subprocess.DEVNULL)
        os.close(theirs)
        text = b""
        while True:
            try:
                data = os.read(ours, 4096)
            except OSError:  # the other end is closed
                break
            text += data
        os.close(ours)
        self.assertEqual(run.wait(60), 0)
        lines = text.decode().replace("\r", "").splitlines()
        longest = max((line for line in lines if "/" not in line), key=len)  # a path is one word and is not broken
        self.assertLessEqual(len(longest), 50, longest)
        self.assertTrue(any("..." in line for line in lines))  # a long target, shortened in its middle
        self.assertGreater(max(map(len, self.ok("inspect", "noto").out.splitlines())), 50)

    def test_errors(self):
        self.assertEqual(self.fails(1, "no file 'trubo'", "plan", "--lora", "trubo")["code"], "notfound")
        self.assertIn("did you mean 'turbo'?", self.fails(1, "trubo", "plan", "--lora", "trubo")["message"])
        self.fails(1, "'no/such.safetensors'", "plan", "--lora", "no/such.safetensors:0.5")
        self.assertEqual(self.fails(1, "'./nowhere'", "plan", "--model", "./nowhere", "--lora", "turbo")["code"], "notfound")
        path = write_safetensors(self.path("a.safetensors"), lora(BLOCK, 128, 64))
        self.assertEqual(self.fails(1, "to_q", "plan", "--lora", path)["code"], "mismatch")

    def test_a_file_in_the_working_directory_wins_over_a_bundled_name(self):
        write_safetensors(self.path("turbo"), lora(BLOCK, 128, 128))
        doc = self.ok("plan", "--lora", "turbo", "--json", cwd=self.dir)
        self.assertEqual(doc["keys_matched"], 3)
        self.assertEqual(os.listdir(self.dir), ["turbo"])  # nothing was written

    def test_odd_paths(self):
        for name in ("a:b.safetensors", "a,b", "C:\\x.safetensors"):
            path = write_safetensors(self.path(name), lora(BLOCK, 128, 128))
            self.assertEqual(self.ok("plan", "--lora", path, "--json")["keys_matched"], 3)
            self.assertEqual(self.ok("plan", "--lora", path + ":-0.5,alpha=1", "--json")["adapters"][0]["strength"], -0.5)


if __name__ == "__main__":
    unittest.main()
