"""generate --script, and the ways of generate: pictures are the same bytes whatever happens around them."""
import json
import os
import shutil
import signal
import subprocess
import time
import unittest

from cli import MODEL, PAGEFLIP, SOURCE, WEIGHTS, Case, draws, pageflip, read

CAT = "--class 25 --steps 1 --guidance-scale 1"
ADAPTERS = os.path.join(SOURCE, "data", "adapters")


class Scripted(Case):
    def setUp(self):
        super().setUp()
        self.cache = self.path("cache")

    def script(self, lines, *args, status=0, **kwargs):
        """Runs the lines in self.dir; the results without "open", and the standard error."""
        with open(self.path("script"), "w", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
        result = pageflip("generate", "--json", "--script", self.path("script"), "--cache-dir", self.cache, *args, cwd=self.dir, **kwargs)
        self.assertEqual(result.status, status, result.err + result.out)
        docs = [json.loads(line) for line in result.out.splitlines()]
        self.plan = docs[0]["plan"]
        self.assertEqual((docs[0]["line"], docs[0]["op"]), (0, "open"))
        return docs[1:], result.err

    def alone(self, name, *args):
        self.ok("generate", *CAT.split(), "--cache-dir", "off", "-o", self.path(name), *args)
        return read(self.path(name))


class Script(Scripted):
    def test_a_tour(self):
        docs, err = self.script([
            "# comments and blank lines count as lines", "", f"load style={ADAPTERS}/noto.safetensors", "set style:0.5",
            f"generate {CAT} -o a.png", "status", "unmerge", f"generate {CAT} -o b.png", "merge 2", f"generate {CAT} -o c.png",
            "deactivate", "unload style", f"generate {CAT} --lora noto -o d.png", "wait", "settle", "status"])
        self.assertNotIn("line", err)
        self.assertEqual([(d["line"], d["op"]) for d in docs],
                         [(3, "load"), (4, "set"), (5, "generate"), (6, "status"), (7, "unmerge"), (8, "generate"), (9, "merge"),
                          (10, "generate"), (11, "deactivate"), (12, "unload"), (13, "generate"), (14, "wait"), (15, "settle"),
                          (16, "status")])
        by_line = {d["line"]: d for d in docs}
        for line in (4, 5, 7, 8, 9, 10, 11, 13):
            for field in ("composition", "way", "ms", "peak_anon_bytes"):
                self.assertIn(field, by_line[line])
        for field in ("survival", "fraction_changed", "effect_ms", "tensors_changed", "layers_changed", "keys_matched", "keys_unmatched"):
            self.assertIn(field, by_line[4])
        self.assertEqual(by_line[6]["active"], [{"name": "style", "path": f"{ADAPTERS}/noto.safetensors", "target": "transformer",
                                                 "strength": 0.5, "merged": True}])
        self.assertEqual([a["name"] for a in by_line[6]["adapters"]], ["style"])
        self.assertEqual(by_line[16]["active"], [])
        self.assertEqual(by_line[16]["composition"], by_line[8]["composition"])
        self.assertEqual([by_line[i]["way"] for i in (5, 8, 10, 13)], ["stream", "base", "stream", "stream"])
        self.assertEqual(by_line[10]["composition"], by_line[13]["composition"])
        self.assertEqual(read(self.path("a.png")), self.alone("x.png", "--lora", "noto:0.5"))
        self.assertEqual(read(self.path("b.png")), self.alone("x.png"))
        self.assertEqual(read(self.path("c.png")), self.alone("x.png", "--lora", "noto"))
        self.assertEqual(read(self.path("d.png")), read(self.path("c.png")))
        self.assertEqual(len({read(self.path(f"{n}.png")) for n in "abc"}), 3)

    def test_text(self):
        with open(self.path("script"), "w", encoding="utf-8") as file:
            file.write(f"set noto\ngenerate {CAT} -o a.png\nunmerge\nstatus\n")
        result = self.ok("generate", "--script", "script", "--cache-dir", "off", "-v", cwd=self.dir)
        lines = result.out.splitlines()
        self.assertRegex(lines[0], r"^1 set +stream, effect after [\d.]+ ms, all [\d.]+ ms, [\d.]+ MiB, composition [0-9a-f]{32}, survival")
        self.assertRegex(lines[1], r"^2 generate +a.png, stream, [\d.]+ s, [\d.]+ MiB, [\d.]+ k?M?B read, composition [0-9a-f]{32}$")
        self.assertRegex(lines[2], r"^3 unmerge +base, ")
        self.assertRegex(lines[3], r"^4 status +base, 0 running, .* noto:1 on transformer \(not merged\); plan: .*kept")
        self.assertIn("memory plan: ", result.err)

    def test_switching_under_load(self):
        """A picture drawn while 20 changes happen is the one that is drawn alone; so is one with adapters of its own."""
        big, small = "--class 25 --n 12 --steps 12", "--class 25 --steps 2"
        lines = ["set noto", f"generate {big} -o bg.png &", f"generate {small} --lora night:0.5 -o own.png &"]
        for i in range(5):
            lines += [f"set turbo:{i / 4}", "unmerge", "merge 0.5", "deactivate"]
        lines += ["set night", f"generate {small} -o after.png &", "wait", "status"]
        docs, _ = self.script(lines, "--way", "stream", "--threads", "1")  # so that the changes have a CPU beside the big picture
        changes = [d for d in docs if d["op"] in ("set", "unmerge", "merge", "deactivate")]
        self.assertEqual(len(changes), 22)
        order = [(d["line"], d["op"]) for d in docs]
        self.assertGreater(order.index((2, "generate")), order.index((23, "deactivate")), "the changes did not happen while it drew")
        drawn = {d["line"]: d for d in docs if d["op"] == "generate"}
        self.assertTrue(all(d["background"] for d in drawn.values()))
        self.assertEqual(drawn[2]["composition"], docs[0]["composition"])
        for name, what, lora in (("bg.png", big, "noto"), ("own.png", small, "night:0.5"), ("after.png", small, "night")):
            self.ok("generate", *what.split(), "--lora", lora, "--cache-dir", "off", "-o", self.path("alone.png"))
            self.assertEqual(read(self.path(name)), read(self.path("alone.png")), name)
        self.assertEqual(docs[-1]["running"], 0)

    def test_base_bytes_after_unmerge(self):
        docs, _ = self.script([f"generate {CAT} -o first.png", "set noto night:-2", f"generate {CAT} -o other.png", "unmerge",
                               f"generate {CAT} -o last.png"])
        self.assertEqual(read(self.path("first.png")), read(self.path("last.png")))
        self.assertNotEqual(read(self.path("first.png")), read(self.path("other.png")))
        self.assertEqual(docs[0]["composition"], docs[-1]["composition"])

    def test_every_way_and_residency_and_thread_count_draws_the_same(self):
        want = self.alone("want.png", "--lora", "noto", "--lora", "turbo:0.5")
        digests, places = set(), set()
        for i, (way, args) in enumerate((
                ("stream", []), ("overlay", []), ("inplace", ["--resident", "9"]), ("inplace", ["--resident", "4"]),
                ("stream", ["--host-memory", "3M"]), ("overlay", ["--host-memory", "3M"]),
                ("inplace", ["--resident", "2", "--host-memory", "3M"]), ("auto", ["--resident", "9", "--build-delay", "0"]))):
            for threads in (1, 2):
                name = f"{i}-{threads}.png"
                docs, _ = self.script(["set noto turbo:0.5", *(["settle"] if way in ("inplace", "auto") else []), f"generate {CAT} -o {name}"],
                                      "--way", way, "--threads", threads, *args)
                self.assertEqual(read(self.path(name)), want, (way, args, threads))
                digests.add(docs[-1]["composition"])
                plan = self.plan
                places.add((docs[-1]["way"], plan["layers_kept"] > 0, plan["layers_mapped"] > 0, plan["layers_resident"] > 0))
        self.assertEqual(len(digests), 1)
        self.assertEqual({place[0] for place in places}, {"stream", "overlay", "inplace"})
        self.assertTrue(any(place[2] for place in places) and any(place[3] for place in places))

    def test_f32_is_another_composition_on_every_way(self):
        docs, _ = self.script(["set night merge-dtype=f32", f"generate {CAT} -o a.png", "set night merge-dtype=f32 way=overlay",
                               f"generate {CAT} -o b.png", f"generate {CAT} --lora night --merge-dtype f32 -o c.png", "set night"])
        self.assertEqual([d["way"] for d in docs], ["stream", "stream", "overlay", "overlay", "overlay", "stream"])
        self.assertEqual({d["composition"] for d in docs[:-1]}, {docs[0]["composition"]})
        self.assertNotEqual(docs[-1]["composition"], docs[0]["composition"])
        self.assertAlmostEqual(docs[0]["survival"], 1, 6)
        self.assertEqual(len({read(self.path(f"{n}.png")) for n in "abc"}), 1)
        self.assertEqual(read(self.path("a.png")), self.alone("x.png", "--lora", "night", "--merge-dtype", "f32"))

    def test_settle_builds_and_the_next_start_adopts(self):
        docs, _ = self.script(["set noto", "settle", "status", f"generate {CAT} -o a.png"])
        self.assertEqual(docs[0]["way"], "stream")
        self.assertEqual((docs[2]["way"], docs[2]["builds"], docs[2]["building"]), ("overlay", 1, False))
        self.assertGreater(docs[2]["cache_bytes"], 0)
        self.assertEqual(docs[3]["way"], "overlay")
        docs, _ = self.script(["set noto", "status"])
        self.assertEqual((docs[0]["way"], docs[1]["builds"], docs[1]["adoptions"]), ("overlay", 0, 1))

    def test_lora_options_come_first(self):
        docs, _ = self.script([f"generate {CAT} -o a.png"], "--lora", "noto:0.5", "--lora", "turbo")
        self.assertEqual([(d["line"], d["op"]) for d in docs], [(0, "set"), (1, "generate")])
        self.assertEqual(docs[0]["composition"], docs[1]["composition"])

    def test_nicknames(self):
        for name in ("a", "b"):
            os.mkdir(self.path(name))
            shutil.copy(os.path.join(ADAPTERS, "noto.safetensors"), self.path(name, "my style.safetensors"))
        docs, _ = self.script(["set 'a/my style.safetensors' 'b/my style.safetensors:0.5' night", "set my-style my-style-2:0.5 night", "status"],
                              "--lora", "turbo", "--lora", "turbo:0.5")
        self.assertEqual(docs[1]["composition"], docs[2]["composition"])
        self.assertEqual([a["name"] for a in docs[3]["adapters"]], ["turbo", "my-style", "my-style-2", "night"])

    def test_a_changed_adapter_is_loaded_anew_and_old_pictures_keep_theirs(self):
        path = shutil.copy(os.path.join(ADAPTERS, "noto.safetensors"), self.path("x.safetensors"))
        run = subprocess.Popen([PAGEFLIP, "generate", "--json", "--script", "-", "--cache-dir", "off"], cwd=self.dir, stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

        def do(line):
            run.stdin.write(line + "\n")
            run.stdin.flush()
            return json.loads(run.stdout.readline())

        self.assertEqual(json.loads(run.stdout.readline())["op"], "open")
        first = do(f"load x={path}"), do("set x")
        shutil.copy(os.path.join(ADAPTERS, "turbo.safetensors"), self.path("new"))
        os.replace(self.path("new"), path)
        second = do("set x"), do(f"load x={path}"), do("set x")
        self.assertEqual(first[1]["composition"], second[0]["composition"])
        self.assertNotEqual(first[1]["composition"], second[2]["composition"])
        error = do("unload x")["error"]
        self.assertEqual((error["code"], "deactivate it first" in error["message"]), ("busy", True))
        run.communicate(timeout=60)
        self.assertEqual(run.returncode, 1)

    def test_standard_input(self):
        done = subprocess.run([PAGEFLIP, "generate", "--script", "-", "--cache-dir", "off"], cwd=self.dir, capture_output=True, text=True,
                              input="set noto\nstatus", timeout=60, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stdout, r"(?m)^2 status ")


class Errors(Scripted):
    def wrong(self, text, *lines, code="invalid", args=()):
        """The last line fails with text and its number; nothing after it is run."""
        docs, err = self.script([*lines, "status"], *args, status=1)
        error = docs[-1]
        self.assertEqual((error["line"], error["error"]["code"]), (len(lines), code), error)
        self.assertIn(text, error["error"]["message"])
        self.assertIn(f"pageflip: line {len(lines)}: {error['error']['message']}", err)
        return error

    def test_lines(self):
        self.wrong("unknown word 'sett'; did you mean 'set'?", "wait", "sett noto")
        self.wrong("no file 'nobody', and no bundled adapter of that name", "set nobody", code="notfound")
        self.wrong("strength is not finite", "set noto:inf")
        self.wrong("'vae'", "set noto target=vae", code="notfound")
        self.wrong("'vae'", "set noto,target=vae", code="notfound")
        self.wrong("nothing is remembered", "merge", code="state")
        self.wrong("nothing is remembered", "set noto", "deactivate", "merge", code="state")
        self.wrong("no adapter is loaded as 'x'", "unload x", code="notfound")
        self.wrong("in use by a view", "set noto", "unload noto", code="busy")
        self.wrong("no file 'none.safetensors'", "load x=none.safetensors", code="notfound")
        self.wrong("nothing to draw", "generate")
        self.wrong("unknown option '--stepz'; did you mean '--steps'?", "generate --class 1 --stepz 3")
        self.wrong("'x' is one argument too many", "generate --class 1 x")
        self.wrong("a 'generate' line takes no --json", "generate --class 1 --json")
        self.wrong("unknown option '--model'", "generate --class 1 --model x")
        self.wrong("goes with its own --lora", "generate --class 1 --merge-dtype f32")
        self.wrong("class 64 does not exist", "generate --class 64", code="notfound")
        self.wrong("there is no directory 'no'", "generate --class 1 -o no/x.png", code="notfound")
        self.wrong("lora 'noto:nan'", "generate --class 1 --lora noto:nan")
        self.wrong("a quote ' is not closed", "generate --prompt 'a")
        self.wrong("NUL byte", "status\0")
        self.wrong("more than 65536 characters", "#" + "x" * 70000)
        self.assertEqual([n for n in os.listdir(self.dir) if n.endswith(".png")], [])

    def test_a_failed_change_leaves_everything(self):
        docs, _ = self.script(["set noto", "set night nobody", "set noto:nan", "set night target=vae", "status"], "--keep-going", status=1)
        self.assertEqual(["error" in d for d in docs], [False, True, True, True, False])
        self.assertEqual(docs[-1]["composition"], docs[0]["composition"])

    def test_a_picture_in_the_background_that_fails(self):
        """It is named by its own line, also after later ones, and the script stops; what else was being drawn is finished."""
        os.mkdir(self.path("d"))
        lines = [f"generate {CAT} --n 64 -o d/x.png &", f"generate {CAT} -o good.png &", "wait", "status"]
        script = "\n".join(lines).encode() + b"\n"
        run = subprocess.Popen([PAGEFLIP, "generate", "--json", "--script", "-", "--cache-dir", "off"], cwd=self.dir, stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        run.stdin.write(script.split(b"\n")[0] + b"\nstatus\n")
        run.stdin.flush()
        first = [json.loads(run.stdout.readline()) for _ in range(2)]
        self.assertEqual([d["op"] for d in first], ["open", "status"])
        os.rmdir(self.path("d"))
        out, err = run.communicate(b"\n".join(script.split(b"\n")[1:]), timeout=100)
        docs = [json.loads(line) for line in out.splitlines()]
        self.assertEqual(run.returncode, 1, err)
        bad = [d for d in docs if "error" in d]
        self.assertEqual([(d["line"], d["op"], d["error"]["code"]) for d in bad], [(1, "generate", "notfound")])
        self.assertIn("cannot create 'd/x.png'", bad[0]["error"]["message"])
        self.assertEqual(docs[-1]["op"], "wait")
        self.assertTrue(os.path.exists(self.path("good.png")))

    def test_files_and_usage(self):
        self.assertEqual(self.fails(1, "cannot open script 'none'", "generate", "--script", "none", cwd=self.dir)["code"], "notfound")
        result = pageflip("generate", "--script", self.dir, "--cache-dir", "off")
        self.assertEqual(result.status, 1)
        self.assertIn(f"cannot read script '{self.dir}': Is a directory", result.err)
        for text, args in (("takes its pictures from the script", ["--script", "x", "--class", "1"]),
                           ("'--keep-going' goes with --script", ["--class", "1", "--keep-going"]),
                           ("'--build-delay' goes with --script", ["--class", "1", "--build-delay", "1"]),
                           ("'--build-delay' takes seconds", ["--script", "x", "--build-delay", "-1"]),
                           ("say how many with --resident N", ["--class", "1", "--way", "inplace"]),
                           ("takes one of auto|overlay|stream|inplace", ["--class", "1", "--way", "quick"]),
                           ("'--host-memory' takes a size in bytes, or like 512M, 4G, not '3X'", ["--class", "1", "--host-memory", "3X"]),
                           ("'--cache-budget' takes a size", ["--class", "1", "--cache-budget", "-1"])):
            self.assertEqual(self.fails(2, text, "generate", *args)["code"], "usage")

    def test_ctrl_c(self):
        run = subprocess.Popen([PAGEFLIP, "generate", "--json", "--script", "-", "--cache-dir", "off"], cwd=self.dir, stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        run.stdin.write("generate --grid --steps 10000 -o x.png &\nstatus\nwait\n")
        run.stdin.flush()
        self.assertEqual([json.loads(run.stdout.readline())["op"] for _ in range(2)], ["open", "status"])
        time.sleep(0.3)  # until `wait` waits; before, the process ends at once, which has the same status
        run.send_signal(signal.SIGINT)
        out, err = run.communicate(timeout=60)
        self.assertEqual(run.returncode, 130, err)
        self.assertFalse(os.path.exists(self.path("x.png")))
        for line in out.splitlines():
            json.loads(line)


class OneShot(Scripted):
    def draw(self, name, *args):
        doc = self.ok("generate", *CAT.split(), "--json", "-o", self.path(name), *args)
        return read(self.path(name)), doc

    def test_the_plan_is_reported(self):
        _, doc = self.draw("a.png", "--host-memory", "4M", "--resident", "1")
        plan = doc["plan"]
        self.assertEqual((plan["available_bytes"], plan["layers_resident"]), (4 << 20, 1))
        self.assertGreater(plan["layers_kept"], 0)
        self.assertGreater(plan["layers_mapped"], 0)
        self.assertRegex(plan["note"], r"allowed (are )?4 MiB")
        self.assertIn("dropped behind the reader", plan["note"])
        result = self.ok("generate", *CAT.split(), "-v", "-o", self.path("a.png"))
        self.assertIn("memory plan: ", result.err)
        self.assertRegex(result.out, r"(?m)^way +base$")

    def test_the_cache_is_only_used_when_it_is_there(self):
        env = {"XDG_CACHE_HOME": self.path("xdg")}
        want = self.draw("a.png", "--lora", "noto", "--cache-dir", self.cache)
        self.assertEqual(want[1]["way"], "stream")
        self.ok("generate", *CAT.split(), "--lora", "noto", "-o", self.path("b.png"), env=env)
        self.assertFalse(os.path.exists(self.cache) or os.path.exists(self.path("xdg")))
        os.mkdir(self.cache)
        for args in ([], ["--lora", "noto", "--way", "stream"], ["--lora", "noto", "--way", "inplace", "--resident", "2"]):
            self.draw("c.png", "--cache-dir", self.cache, *args)
            self.assertEqual(os.listdir(self.cache), [])
        self.draw("c.png", "--cache-dir", self.cache, "--lora", "noto")
        self.assertEqual([n for n in os.listdir(self.cache) if os.path.exists(os.path.join(self.cache, n, "manifest.json"))], [])
        built = self.draw("d.png", "--cache-dir", self.cache, "--lora", "noto", "--way", "overlay")
        adopted = self.draw("e.png", "--cache-dir", self.cache, "--lora", "noto")
        by_env = pageflip("generate", *CAT.split(), "--json", "--lora", "noto", "-o", self.path("f.png"), env={"PAGEFLIP_CACHE": self.cache})
        self.assertEqual([d["way"] for d in (built[1], adopted[1], by_env.json)], ["overlay"] * 3)
        self.assertEqual({want[0], built[0], adopted[0], read(self.path("f.png"))}, {want[0]})

    def test_a_cache_that_cannot_be_is_said_and_nothing_else(self):
        open(self.path("file"), "wb").close()
        result = self.ok("generate", *CAT.split(), "--lora", "noto", "--way", "overlay", "--cache-dir", self.path("file"), "-o",
                         self.path("a.png"))
        self.assertIn("streaming instead of an overlay", result.err)
        self.assertEqual(read(self.path("a.png")), self.draw("b.png", "--lora", "noto")[0])

    def test_inplace_and_small_memory_draw_the_same(self):
        want = self.draw("a.png", "--lora", "noto")[0]
        for i, args in enumerate((["--way", "inplace", "--resident", "9"], ["--host-memory", "2M"], ["--resident", "3"],
                                  ["--way", "stream", "--host-memory", "1K"])):
            got, doc = self.draw(f"{i}.png", "--lora", "noto", *args)
            self.assertEqual(got, want, args)
            self.assertEqual(doc["way"], "inplace" if "9" in args else "stream")


class BaseChanges(Scripted):
    """C103 and its kin: the weights file is rewritten while it is mapped. No picture, an error, no crash."""

    def setUp(self):
        super().setUp()
        self.model = shutil.copytree(MODEL, self.path("model"))
        self.weights = os.path.join(self.model, WEIGHTS)

    def longer_header(self):
        data = read(self.weights)
        n = int.from_bytes(data[:8], "little")
        with open(self.weights, "r+b") as file:  # in place: the mapping sees it
            file.write((n + 64).to_bytes(8, "little") + data[8:8 + n] + b" " * 64 + data[8 + n:])

    def truncate(self):
        os.truncate(self.weights, 4096)

    def touch(self):
        os.utime(self.weights, ns=(1, 1))

    def change_while_drawing(self, change, *lines):
        """The run and its answer to `generate`, which draws in the background while change() is called."""
        run = subprocess.Popen([PAGEFLIP, "generate", "--json", "--script", "-", "--cache-dir", "off", "--model", self.model],
                               cwd=self.dir, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        run.stdin.write("".join(f"{line}\n" for line in (*lines, "generate --class 1 --steps 8 --n 8 -o x.png &", "status")))
        run.stdin.flush()
        while json.loads(run.stdout.readline())["op"] != "status":
            pass
        change()
        out, err = run.communicate("wait\n", timeout=100)
        return run.returncode, [d for d in map(json.loads, out.splitlines()) if d["op"] == "generate"][0], err

    def test_while_a_script_draws(self):
        for change, code in ((self.longer_header, "changed"), (self.truncate, "truncated")):
            shutil.copy(os.path.join(MODEL, WEIGHTS), self.weights)
            status, doc, err = self.change_while_drawing(change)
            self.assertEqual(status, 1, err)
            self.assertEqual(doc["error"]["code"], code, change)
            self.assertIn("'x.png' is not written", doc["error"]["message"])
            self.assertFalse(os.path.exists(self.path("x.png")))

    def test_a_touched_base_is_the_same_base(self):
        status, _, err = self.change_while_drawing(self.touch)
        self.assertEqual(status, 0, err)
        self.ok("generate", "--class", "1", "--steps", "8", "--n", "8", "-o", self.path("want.png"))
        self.assertEqual(read(self.path("x.png")), read(self.path("want.png")))

    def test_an_adapter_that_is_written_over(self):
        path = shutil.copy(os.path.join(ADAPTERS, "noto.safetensors"), self.path("noto.safetensors"))

        def overwrite():
            with open(path, "r+b") as file:
                file.seek(-4096, os.SEEK_END)
                file.write(bytes(4096))

        status, doc, err = self.change_while_drawing(overwrite, f"load n={path}", "set n")
        self.assertEqual(status, 1, err)
        self.assertEqual((doc["error"]["code"], "noto.safetensors' changed" in doc["error"]["message"]), ("changed", True))
        self.assertFalse(os.path.exists(self.path("x.png")))

    def test_while_one_picture_is_drawn(self):
        run, rest = draws("--model", self.model, "--class", "1", "--steps", "20", "--n", "8", "-o", "x.png", cwd=self.dir)
        self.longer_header()
        err = rest()
        run.communicate(timeout=100)
        self.assertEqual(run.returncode, 1)
        self.assertIn("'x.png' is not written", err)
        self.assertEqual(os.listdir(self.dir), ["model"])


if __name__ == "__main__":
    unittest.main()
