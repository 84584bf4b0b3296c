"""cache: what list says, verify finds, evict and clear remove; beside a process that uses an entry; where the cache is."""
import os
import shutil
import subprocess
import unittest

from cli import MODEL, SOURCE, Case

MAKE = os.environ["PF_MAKE_OVERLAY"]
NOTO = os.path.join(SOURCE, "data", "adapters", "noto.safetensors")


class Cache(Case):
    def setUp(self):
        super().setUp()
        self.cache = self.path("cache")

    def make(self, strength=1, how="whole", model=MODEL):
        done = subprocess.run([MAKE, self.cache, model, NOTO, str(strength), how], capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout.strip()

    def hold(self):
        """A process that has the entry mapped; ends with the test."""
        process = subprocess.Popen([MAKE, self.cache, MODEL, NOTO, "1", "held"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        digest = process.stdout.readline().strip()
        self.addCleanup(process.wait)
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.stdin.close)
        return digest, process

    def cmd(self, word, *args, **kwargs):
        return self.ok("cache", word, "--cache-dir", self.cache, *args, **kwargs)

    def entries(self):
        return {e["digest"]: e for e in self.cmd("list", "--json")["entries"]}

    def flip(self, digest):
        """One bit of the last byte of a layer file; returns the file's name."""
        name = sorted(os.listdir(os.path.join(self.cache, digest)))[1]
        with open(os.path.join(self.cache, digest, name), "r+b") as file:
            file.seek(-1, os.SEEK_END)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_END)
            file.write(bytes([byte ^ 1]))
        return name

    def test_nothing_yet(self):
        doc = self.cmd("list", "--json")
        self.assertEqual((doc["entries"], doc["bytes"], doc["path"]), ([], 0, self.cache))
        self.assertRegex(self.cmd("list").out, r"(?m)^entries +0, 0 ")
        self.assertEqual(self.cmd("clear", "--json"), {"evicted": 0, "bytes": 0, "left": 0})
        self.assertEqual(self.cmd("verify", "--json"), {"entries": [], "unsound": 0})
        self.assertEqual(self.fails(1, "no overlay 'abcd'", "cache", "evict", "--cache-dir", self.cache, "abcd")["code"], "notfound")
        self.assertFalse(os.path.exists(self.cache))  # looking does not make it

    def test_what_others_leave_in_an_entry(self):
        """Of NFS, of a file manager: the entry is still one, and goes; what is theirs stays."""
        digest = self.make()
        theirs = os.path.join(self.cache, digest, ".nfs0000000000000001")
        with open(theirs, "wb") as file:
            file.write(b"x")
        self.assertEqual(self.entries()[digest]["state"], "complete")
        self.assertEqual(self.cmd("verify", "--json")["unsound"], 0)
        self.cmd("evict", digest)
        self.assertEqual(self.entries(), {})
        self.assertEqual(os.listdir(os.path.dirname(theirs)), [os.path.basename(theirs)])

    def test_list(self):
        whole, f32, partial = self.make(), self.make(-0.5, "f32"), self.make(0.25, "partial")
        entries = self.entries()
        self.assertEqual({d: e["state"] for d, e in entries.items()}, {whole: "complete", f32: "complete", partial: "partial"})
        one = entries[whole]
        self.assertEqual([(a["path"], a["strength"], a["alpha"], a["target"]) for a in one["adapters"]], [(NOTO, 1, None, "all")])
        self.assertEqual((one["base"], one["merge_dtype"], one["in_use"]), (os.path.realpath(MODEL), "base", False))
        on_disk = sum(os.path.getsize(os.path.join(self.cache, whole, n)) for n in os.listdir(os.path.join(self.cache, whole)))
        self.assertEqual(one["bytes"], on_disk)
        self.assertRegex(one["last_use"], r"^20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ$")
        self.assertEqual((entries[f32]["merge_dtype"], entries[f32]["adapters"][0]["strength"]), ("f32", -0.5))
        self.assertEqual((entries[partial]["base"], entries[partial]["adapters"]), (None, []))
        self.assertGreater(entries[partial]["bytes"], 0)
        text = self.cmd("list").out
        self.assertRegex(text, rf"(?m)^  noto 1 +{os.path.realpath(MODEL)} +{whole[:12]} +complete +\d.*B +20")
        self.assertRegex(text, rf"(?m)^  noto -0.5 in f32 +.*{f32[:12]}")
        self.assertRegex(text, rf"(?m)^  \? +\? +{partial[:12]} +partial")

    def test_verify(self):
        good, bad = self.make(), self.make(0.5)
        self.assertEqual(self.cmd("verify", good, "--json"), {"digest": good, "sound": True, "base": "proved"})
        self.assertRegex(self.cmd("verify").out, r"(?m)^entries +2 complete, 0 not sound$")
        name = self.flip(bad)
        result = self.fails(1, name, "cache", "verify", "--cache-dir", self.cache, bad)
        self.assertEqual(result["code"], "format")
        self.assertIn("not those that were written", result["message"])
        everything = self.run_all_verify(1)
        self.assertEqual(everything["unsound"], 1)
        self.assertEqual({e["digest"]: e["sound"] for e in everything["entries"]}, {good: True, bad: False})
        self.cmd("evict", bad[:8])
        self.assertEqual(self.run_all_verify(0)["unsound"], 0)

    def run_all_verify(self, status):
        from cli import pageflip
        result = pageflip("cache", "verify", "--cache-dir", self.cache, "--json")
        self.assertEqual(result.status, status, result.err)
        return result.json

    def test_verify_proves_the_base(self):
        model = self.path("model")
        shutil.copytree(MODEL, model)
        digest = self.make(model=model)
        self.assertEqual(self.cmd("verify", digest, "--json")["base"], "proved")
        weights = os.path.join(model, "transformer", "diffusion_pytorch_model.safetensors")
        with open(weights, "r+b") as file:
            file.seek(-5, os.SEEK_END)
            file.write(b"\x00\x01")
        self.assertEqual(self.cmd("verify", digest, "--json")["base"], "replaced")
        shutil.rmtree(model)
        self.assertEqual(self.cmd("verify", digest, "--json")["base"], "absent")

    def test_evict_and_clear(self):
        one, two, three = self.make(), self.make(0.5), self.make(0.25, "partial")
        self.assertEqual(self.cmd("evict", two[:6], "--json"), {"evicted": two[:6]})
        self.assertEqual(set(self.entries()), {one, three})
        report = self.cmd("clear", "--json")
        self.assertEqual((report["evicted"], report["left"]), (2, 0))
        self.assertGreater(report["bytes"], 1000)
        self.assertEqual([n for n in os.listdir(self.cache) if not n.endswith(".lock")], [])

    def test_what_is_in_use_stays(self):
        digest, process = self.hold()
        other = self.make(0.5)
        self.assertTrue(self.entries()[digest]["in_use"])
        self.assertRegex(self.cmd("list").out, rf"{digest[:12]} +complete, in use")
        error = self.fails(1, f"overlay '{digest}' is in use", "cache", "evict", "--cache-dir", self.cache, digest)
        self.assertEqual(error["code"], "busy")
        self.assertRegex(self.cmd("clear").out, r"(?m)^evicted +1, .*\nleft +1, in use$")
        self.assertEqual(set(self.entries()), {digest})
        self.assertNotIn(other, self.entries())
        process.stdin.close()
        process.wait()
        self.assertEqual(self.cmd("clear", "--json")["evicted"], 1)

    def test_digests(self):
        for text in ("abc", "xyzw", "ABCD", "0" * 33):
            self.assertEqual(self.fails(1, f"'{text}' is no digest" if text != "0" * 33 else "is no digest", "cache", "evict",
                                        "--cache-dir", self.dir, text)["code"], "invalid")
        for tail in ("0", "1"):
            os.mkdir(self.path("abcd" + "0" * 27 + tail))
            open(self.path("abcd" + "0" * 27 + tail, "layer-00001.safetensors"), "wb").close()
        self.assertEqual(self.fails(1, "2 overlays", "cache", "evict", "--cache-dir", self.dir, "abcd")["code"], "ambiguous")
        self.fails(2, "DIGEST is missing", "cache", "evict")

    def test_path(self):
        env = {"PAGEFLIP_CACHE": "", "XDG_CACHE_HOME": "/x", "HOME": "/h"}
        self.assertEqual(self.ok("cache", "path", "--cache-dir", "/a/b").out, "/a/b\n")
        self.assertEqual(self.ok("cache", "path", env=env).out, "/x/pageflip\n")
        self.assertEqual(self.ok("cache", "path", "--json", env={**env, "XDG_CACHE_HOME": ""}), {"path": "/h/.cache/pageflip"})
        self.assertEqual(self.ok("cache", "path", env={**env, "PAGEFLIP_CACHE": "/p"}).out, "/p\n")
        for word in ("path", "list", "verify", "clear"):
            self.assertEqual(self.fails(1, "the cache is off", "cache", word, env={**env, "PAGEFLIP_CACHE": "off"})["code"], "state")

    def test_a_file_is_no_cache(self):
        open(self.cache, "wb").close()
        self.fails(1, "is not a directory", "cache", "list", "--cache-dir", self.cache)


if __name__ == "__main__":
    unittest.main()
