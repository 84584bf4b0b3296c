"""completion: scripts that the shells accept and that offer what the tables have; the man page agrees with the tables."""
import os
import shutil
import subprocess
import unittest

from cli import PAGEFLIP, SOURCE, Case


class Completion(Case):
    def complete(self, *words):
        """What bash would offer for the last word."""
        script = self.ok("completion", "bash").out
        text = "\n".join([script, "COMP_WORDS=(" + " ".join(f"'{w}'" for w in words) + ")", f"COMP_CWORD={len(words) - 1}",
                          "compopt() { :; }", "_pageflip", 'printf "%s\\n" "${COMPREPLY[@]}"'])
        done = subprocess.run(["bash", "--norc", "-c", text], capture_output=True, text=True, cwd=self.dir, check=True)
        self.assertEqual(done.stderr, "")
        return done.stdout.split()

    def test_bash_parses(self):
        script = self.ok("completion", "bash").out
        done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
        self.assertEqual((done.returncode, done.stderr), (0, ""))

    def test_bash_offers_commands_options_and_values(self):
        tables = self.ok("help", "--json")
        self.assertEqual(set(self.complete("pageflip", "")),
                         {c["name"].split()[0] for c in tables["commands"]} | {"--help", "--version"})
        self.assertEqual(self.complete("pageflip", "ins"), ["inspect"])
        for command in tables["commands"]:
            words = command["name"].split()
            self.assertEqual(sorted(self.complete("pageflip", *words, "--")),
                             sorted("--" + o["name"] for o in command["options"] + tables["common_options"]))
        self.assertEqual(self.complete("pageflip", "merge", "--merge-dtype", ""), ["base", "f32"])
        self.assertEqual(self.complete("pageflip", "merge", "--merge-dtype", "=", ""), ["base", "f32"])
        self.assertEqual(self.complete("pageflip", "merge", "--merge-dtype", "="), ["base", "f32"])
        self.assertEqual(self.complete("pageflip", "plan", "--lora", "t"), ["turbo"])
        self.assertEqual(self.complete("pageflip", "bench", "make", "--shape", ""), ["h3", "dit", "emoji"])
        self.assertEqual(self.complete("pageflip", "completion", ""), ["bash", "zsh"])
        self.assertIn("merge", self.complete("pageflip", "help", ""))

    def test_bash_offers_files(self):
        open(self.path("mine.safetensors"), "wb").close()
        for option in ("--lora", "--model", "-m", "-o"):
            self.assertEqual(self.complete("pageflip", "merge", option, "mi"), ["mine.safetensors"])
        self.assertEqual(self.complete("pageflip", "inspect", "mi"), ["mine.safetensors"])
        os.mkdir(self.path("turbots"))
        self.assertEqual(self.complete("pageflip", "serve", "--adapter-dir", "tur"), ["turbots"])
        self.assertEqual(self.complete("pageflip", "serve", "--allowed-host", "tur"), [])

    def test_zsh(self):
        script = self.ok("completion", "zsh").out
        self.assertTrue(script.startswith("#compdef pageflip\n"))
        for command in self.ok("help", "--json")["commands"]:
            self.assertIn(f"'{command['name']}')", script)
            for option in command["options"]:
                self.assertIn(f"--{option['name']}", script)
        if not shutil.which("zsh"):
            self.skipTest("zsh is not installed: the script was not parsed by it")
        done = subprocess.run(["zsh", "-n"], input=script, capture_output=True, text=True, check=False)
        self.assertEqual((done.returncode, done.stderr), (0, ""))

    def test_json(self):
        doc = self.ok("completion", "bash", "--json")
        self.assertEqual(doc["shell"], "bash")
        self.assertEqual(doc["script"], self.ok("completion", "bash").out)


class Man(Case):
    check = os.path.join(SOURCE, "tools", "check-man")
    page = os.path.join(SOURCE, "man", "pageflip.1.scd")

    def compare(self, page):
        done = subprocess.run(["/usr/bin/python3", self.check, PAGEFLIP, page], capture_output=True, text=True, check=False)
        return done.returncode, done.stdout

    def test_the_man_page_agrees_with_the_tables(self):
        self.assertEqual(self.compare(self.page)[0], 0, self.compare(self.page)[1])

    def test_the_check_finds_what_is_missing_and_what_is_too_much(self):
        with open(self.page, encoding="utf-8") as file:
            text = file.read()
        changed = self.path("page.scd")
        for old, new, said in (("*--batch* _N_\n", "*--bunch* _N_\n", "--batch is not in the man page"),
                               ("*--batch* _N_\n", "*--bunch* _N_\n", "--bunch is in the man page only"),
                               ("*-n*, *--n* _N_", "*-k*, *--n* _N_", "--n is ('n', 'N') in the table"),
                               ("## pageflip plan", "## pageflip plot", "'pageflip plot', which is no command")):
            self.assertIn(old, text)
            with open(changed, "w", encoding="utf-8") as file:
                file.write(text.replace(old, new))
            status, lines = self.compare(changed)
            self.assertEqual(status, 1)
            self.assertIn(said, lines)


if __name__ == "__main__":
    unittest.main()
