"""A small run of bench/load that judges counts and not times: no wrong picture, no 5xx, and what a kill under load leaves behind."""
import json
import os
import subprocess
import unittest

from cli import SOURCE

SANITIZED = bool(os.environ.get("PF_SANITIZE"))


class Load(unittest.TestCase):
    def test_every_picture_is_the_one_of_its_digest(self):
        args = ["--counting", "--json", "--clients", "16", "--seconds", "8" if SANITIZED else "3", "--window", "1.5", "--steps", "1" if SANITIZED else "2"]
        out = subprocess.run([os.path.join(SOURCE, "bench", "load"), *args], capture_output=True, text=True, timeout=240, check=False)
        self.assertEqual(out.returncode, 0, out.stdout + out.stderr)
        report = json.loads(out.stdout)
        self.assertEqual(report["faults"], [])
        self.assertEqual([report[k] for k in ("wrong", "5xx", "other refusals", "changes failed", "unknown compositions")], [0] * 5)
        # An idle machine has some ten times as much of each.
        self.assertGreaterEqual(report["compositions seen"], 4)
        self.assertGreaterEqual(report["changes"], 3)
        self.assertGreaterEqual(report["pictures"], 8)
        after = report["after the kill"]
        self.assertEqual((after["cache verifies"], after["same composition"], after["adopted"], after["built"], after["same picture"]), (True, True, 1, 0, True))


if __name__ == "__main__":
    unittest.main()
