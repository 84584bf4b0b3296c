"""The shared library exports the public functions and nothing else; what is installed works from where it was installed."""
import os
import re
import shutil
import subprocess
import unittest

from cli import SOURCE, Case

BUILD = os.environ["PF_BUILD"]
PROGRAM = r"""
#include <pageflip.h>
#include <stdio.h>
int main(void)
{
    pf_error err;
    struct pf_checkpoint *ckpt;
    printf("%s\n", pf_version());
    return pf_checkpoint_open("nowhere/at.all", NULL, &ckpt, &err) == PF_OK;
}
"""


def run(*args, **kwargs):
    return subprocess.run(list(args), capture_output=True, text=True, check=False, **kwargs)


class Symbols(Case):
    def golden(self):
        with open(os.path.join(SOURCE, "tests", "cli", "symbols.txt"), encoding="utf-8") as file:
            return file.read().split()

    def test_exported_symbols_are_the_golden_list(self):
        done = run("nm", "-D", "--defined-only", "--format=posix", os.path.join(BUILD, "libpageflip.so"))
        self.assertEqual(done.returncode, 0, done.stderr)
        names = {line.split()[0].split("@")[0] for line in done.stdout.splitlines() if line.split()[1] != "A"}
        # sanitizers and coverage add their own
        names = {name for name in names if not re.match(r"_*(asan|ubsan|tsan|sanitizer|gcov|odr_asan|llvm)", name)}
        self.assertEqual(sorted(names), sorted(self.golden()))

    def test_the_golden_list_is_the_header(self):
        with open(os.path.join(SOURCE, "include", "pageflip.h"), encoding="utf-8") as file:
            text = re.sub(r"/\*.*?\*/", "", file.read(), flags=re.S)
        declared = re.findall(r"PF_API\s[^;{]*?\b(pf_\w+)\s*\(", text)
        self.assertEqual(len(declared), len(set(declared)))
        self.assertEqual(sorted(declared), sorted(self.golden()))

    def test_the_static_library_hides_its_insides(self):
        done = run("nm", "-g", "--defined-only", "--format=posix", os.path.join(BUILD, "libpageflip.a"))
        self.assertEqual(done.returncode, 0, done.stderr)
        names = {line.split()[0] for line in done.stdout.splitlines() if len(line.split()) > 2}
        self.assertEqual([name for name in names if not re.match(r"pf_|_*(asan|ubsan|tsan|gcov|odr_asan)", name)], [])
        self.assertTrue(set(self.golden()) <= names)


class Install(Case):
    def test_the_installed_tree_works_wherever_it_lies(self):
        first, moved = self.path("first"), self.path("moved")
        done = run("cmake", "--install", BUILD, "--prefix", first)
        self.assertEqual(done.returncode, 0, done.stderr)
        os.rename(first, moved)
        done = run(os.path.join(moved, "bin", "pageflip"), "plan", "--lora", "turbo", "--json")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn(os.path.join(moved, "bin", "..", "share", "pageflip"), done.stdout)
        for path in ("include/pageflip.h", "share/bash-completion/completions/pageflip", "share/zsh/site-functions/_pageflip",
                     "share/pageflip/adapters/turbo.safetensors", "share/pageflip/README.md"):
            self.assertTrue(os.path.exists(os.path.join(moved, path)), path)
        # OpenBLAS is opened by path when a picture is drawn: nobody else waits for it or depends on the system's alternatives
        self.assertNotIn("openblas", run("readelf", "-d", os.path.join(moved, "bin", "pageflip")).stdout)
        if shutil.which("scdoc"):
            self.assertTrue(os.path.exists(os.path.join(moved, "share", "man", "man1", "pageflip.1")))

    def test_a_program_links_by_pkg_config(self):
        if os.environ.get("PF_SANITIZE"):
            self.skipTest("a sanitized library does not link into a plain program")
        prefix = self.path("prefix")
        self.assertEqual(run("cmake", "--install", BUILD, "--prefix", prefix).returncode, 0)
        pc = run("find", prefix, "-name", "pageflip.pc").stdout.strip()
        env = {**os.environ, "PKG_CONFIG_PATH": os.path.dirname(pc)}
        with open(self.path("x.c"), "w", encoding="utf-8") as file:
            file.write(PROGRAM)
        for kind in ([], ["--static"]):
            flags = run("pkg-config", f"--define-variable=prefix={prefix}", "--cflags", "--libs", *kind, "pageflip", env=env)
            self.assertEqual(flags.returncode, 0, flags.stderr)
            words = flags.stdout.split()
            if kind:
                words = [w for w in words if w != "-lpageflip"]
                words.insert(0, os.path.join(os.path.dirname(os.path.dirname(pc)), "libpageflip.a"))
            done = run("cc", self.path("x.c"), *words, "-o", self.path("x"))
            self.assertEqual(done.returncode, 0, done.stderr)
            libs = os.path.dirname(os.path.dirname(pc))
            done = run(self.path("x"), env={**os.environ, "LD_LIBRARY_PATH": libs})
            self.assertEqual((done.returncode, done.stdout), (0, "0.1.0\n"), done.stderr)


if __name__ == "__main__":
    unittest.main()
