"""Usage: what is wrong is said in one sentence with the way out, status 2; help and version are results."""
import json
import subprocess
import unittest

from cli import PAGEFLIP, Case, pageflip


class Usage(Case):
    def wrong(self, text, *args):
        error = self.fails(2, text, *args)
        self.assertEqual(error["code"], "usage")
        self.assertRegex(error["message"], r"see 'pageflip .*--help'$")

    def test_commands(self):
        result = pageflip()
        self.assertEqual((result.status, result.out), (2, ""))
        self.assertIn("no command was given", result.err)
        self.wrong("unknown command 'frobnicate'", "frobnicate")
        self.wrong("unknown command 'mrege'; did you mean 'merge'?", "mrege")
        self.wrong("did you mean 'inspect'?", "inspekt")
        self.wrong("'cache' needs a second word: list, verify, evict, clear, path", "cache")
        self.wrong("unknown command 'x" + "y" * 200, "x" + "y" * 200)
        result = pageflip("--json")
        self.assertEqual(result.status, 2)
        self.assertEqual(result.json["error"]["code"], "usage")
        self.assertIn("options follow the command", result.err)
        self.wrong("unknown command 'x'", "x")

    def test_options(self):
        self.wrong("unknown option '--modle'; did you mean '--model'?", "plan", "--modle", "x")
        self.wrong("unknown option '--sede'; did you mean '--seed'?", "generate", "--sede=3")
        self.wrong("unknown option '-Z'", "merge", "-Z")
        self.wrong("option '--output' is missing", "merge", "--lora", "turbo")
        self.wrong("option '--output' needs a value", "merge", "-o")
        self.wrong("option '--merge-dtype' takes one of base|f32, not 'f64'", "plan", "--merge-dtype", "f64")
        self.wrong("option '--threads' takes a whole number from 1 to 256, not '0'", "merge", "-o", "x", "--threads", "0")
        self.wrong("option '--part' takes I/N", "merge", "-o", "x", "--part", "0/2")
        self.wrong("option '--part' takes I/N", "merge", "-o", "x", "--part", "3/2")
        self.wrong("option '--force' takes no value", "merge", "-o", "x", "--force=yes")
        self.wrong("option '--output' was given twice", "merge", "-o", "x", "-o", "y")
        self.wrong("'b' is one argument too many", "inspect", "a", "b")
        self.wrong("'x' is one argument too many", "plan", "x")
        self.wrong("PATH is missing", "inspect")

    def test_generate(self):
        self.wrong("nothing to draw", "generate")
        self.wrong("give only one of --prompt, --class and --grid", "generate", "--grid", "--class", "3")
        self.wrong("give only one of", "generate", "--prompt", "cat", "--class", "3")
        self.wrong("option '--n' does not go with --grid", "generate", "--grid", "--n", "2")
        self.wrong("option '--guidance-scale' must be above 0", "generate", "--class", "1", "--guidance-scale", "0")
        self.wrong("option '--guidance-scale' takes a number, not 'nan'", "generate", "--class", "1", "--guidance-scale", "nan")
        self.wrong("option '--steps' takes a whole number", "generate", "--class", "1", "--steps", "0")
        self.wrong("option '--class' takes a whole number", "generate", "--class", "-1")
        self.wrong("option '--prompt' was given an empty text", "generate", "--prompt", "")

    def test_serve(self):
        self.wrong("option '--build-delay' takes seconds from 0 to 86400", "serve", "--build-delay", "-1")
        self.wrong("option '--build-delay' takes seconds", "serve", "--build-delay", "1e9")
        self.wrong("option '--socket-mode' needs '--socket'", "serve", "--socket-mode", "660")

    def test_lora_texts(self):
        for command in (["plan"], ["merge", "-o", self.path("x")], ["generate", "--class", "1"]):
            self.wrong("lora 'turbo:nan': strength is not finite: 'nan'", *command, "--lora", "turbo:nan")
            self.wrong("alpha is no finite number: 'x'", *command, "--lora", "turbo,alpha=x")
            self.wrong("gives target twice", *command, "--lora", "turbo,target=a,target=b")
            self.wrong("names no file", *command, "--lora", ":1")

    def test_shells(self):
        self.wrong("no completion for shell 'fish'", "completion", "fish")
        self.wrong("SHELL is missing", "completion")
        self.wrong("unknown command 'nothing'", "help", "nothing")
        self.wrong("'merge' has no second word: 'it'", "help", "merge", "it")

    def test_help(self):
        overview = self.ok("--help")
        self.assertEqual(overview.out, self.ok("help").out)
        self.assertEqual(overview.err, "")
        tables = self.ok("help", "--json")
        self.assertGreaterEqual({c["name"] for c in tables["commands"]}, {"inspect", "plan", "merge", "generate"})
        for command in tables["commands"]:
            words = command["name"].split()
            self.assertIn(command["name"], overview.out)
            help_ = self.ok(*words, "--help")
            self.assertEqual(help_.err, "")
            self.assertEqual(help_.out, self.ok(*words, "-h").out)
            self.assertEqual(help_.out, self.ok("help", *words).out)
            self.assertTrue(help_.out.startswith(f"usage: pageflip {command['name']}"))
            for option in command["options"] + tables["common_options"]:
                self.assertRegex(help_.out, rf"(?m)^ +(-\w, )?--{option['name']}( {option['arg']})?( |$)")
            self.assertLessEqual(max(map(len, help_.out.splitlines())), 100)

    def test_help_names_nothing_that_is_not_there(self):
        text = self.ok("help").out + json.dumps(self.ok("help", "--json"))
        for word in ("cuda", "python"):
            self.assertNotIn(word, text.lower())

    def test_version(self):
        self.assertRegex(self.ok("--version").out, r"^pageflip \d+\.\d+\.\d+\n$")
        self.assertEqual(self.ok("-V").out, self.ok("--version").out)

    def test_full_standard_output_is_a_failure(self):
        with open("/dev/full", "wb") as full:
            result = pageflip("help", stdout=full)
        self.assertEqual(result.status, 1)
        self.assertIn("cannot write to standard output", result.err)

    def test_abbreviations_and_order(self):
        self.assertEqual(self.ok("inspect", "--json", "--", "turbo")["family"], "lora")
        self.assertEqual(self.ok("inspect", "turbo", "--json")["family"], "lora")


class NoData(Case):
    def test_a_program_without_data_says_so(self):
        subprocess.run(["cp", PAGEFLIP, self.path("pageflip")], check=True)
        done = subprocess.run([self.path("pageflip"), "plan", "--lora", "turbo"], capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 1)
        self.assertIn("no bundled data found in '" + self.path("share", "pageflip"), done.stderr)
        self.assertIn("--model", done.stderr)


if __name__ == "__main__":
    unittest.main()
