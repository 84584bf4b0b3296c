"""The page in a real browser: drawn with, changed by keyboard alone, watched while an overlay is built, with the server lost and back.

The program is $PAGEFLIP, the source tree $PF_SOURCE. Screenshots go to $PF_PICTURES when it is set. Needs chromium and chromedriver."""
import base64
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
import unittest

from webdriver import Browser, wait_for

PAGEFLIP = os.environ["PAGEFLIP"]
PICTURES = os.environ.get("PF_PICTURES")
N_MODEL_BYTES = 10**9  # of the model that the build is watched on
N_ROOM_BYTES = 3 * 2**30
KEY = "a-key-for-the-test-of-the-page"

# Every visible text against what lies behind it: those below 4.5 to 1, or 3 to 1 for large text.
CONTRAST = """
const luminance = (c) => c.slice(0, 3).map((v) => v / 255).map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
  .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
const parse = (text) => { const n = text.match(/[\\d.]+/g).map(Number); return n.length < 4 ? [...n, 1] : n; };
const behind = (e) => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor); if (c[3] > 0) return c; } return [255, 255, 255, 1]; };
const bad = [];
for (const e of document.querySelectorAll("body *")) {
  const text = [...e.childNodes].filter((n) => n.nodeType === 3 && n.textContent.trim()).map((n) => n.textContent.trim()).join(" ");
  if (!(text || e.value && e.type !== "range" && e.type !== "checkbox") || !e.checkVisibility() || e.closest("datalist, noscript, .skip")) continue;
  const style = getComputedStyle(e), a = luminance(parse(style.color)), b = luminance(behind(e));
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), size = parseFloat(style.fontSize);
  if (ratio < (size >= 24 ? 3 : 4.5)) bad.push(`${e.tagName}#${e.id} '${text.slice(0, 40)}' ${ratio.toFixed(2)}`);
}
return bad;
"""
CELLS = "return [...document.querySelectorAll('#map .cell')].map((c) => c.getAttribute('aria-label'));"
LETTERS = "return [...document.querySelectorAll('#map .cell')].map((c) => c.dataset.letter).join('');"
DRAWN = """return [...document.querySelectorAll('#pictures figure:has(img)')].map((f) => [f.querySelector('img').src, f.querySelector('img').alt,
  f.querySelector('figcaption').textContent, f.querySelector('code').title, f.querySelector('img').naturalWidth]);"""


class Server:
    """`pageflip serve`, on any free port first and on the same one when it is started again."""

    def __init__(self, *args):
        self.args, self.port, self.process = args, 0, None

    def start(self):
        user = ["--user", "root"] if os.geteuid() == 0 else []  # so that the kernel tells what is in the page cache
        self.process = subprocess.Popen([PAGEFLIP, "serve", "--port", str(self.port), "--log", "none", *user, *map(str, self.args)], stdout=subprocess.PIPE,
                                        stdin=subprocess.DEVNULL)
        line = self.process.stdout.readline().decode()
        self.port = int(line.strip().rpartition(":")[2])
        return self

    def stop(self, sig=signal.SIGTERM):
        if self.process:
            self.process.send_signal(sig)
            self.process.wait(30)
            self.process.stdout.close()
            self.process = None

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}/"

    def ask(self, method, path, body=None, key=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, None if body is None else json.dumps(body),
                               {"Content-Type": "application/json", **({"Authorization": "Bearer " + key} if key else {})})
            reply = connection.getresponse()
            return reply.status, json.loads(reply.read())
        finally:
            connection.close()

    def get(self, path):
        status, doc = self.ask("GET", path)
        assert status == 200, doc
        return doc

    def strengths(self):
        return {a["nickname"]: a["strength"] for a in self.get("/v1/list_loras")["active"].get("transformer", []) if a["merged"]}


class Page(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.browser = Browser()
        cls.addClassCleanup(cls.browser.close)

    def setUp(self):
        self.dir = tempfile.mkdtemp(prefix="pf-page-")
        self.addCleanup(shutil.rmtree, self.dir, ignore_errors=True)
        self.browser.size(1280, 960)
        self.browser.prefer("light")

    def tearDown(self):
        self.browser.open("about:blank")

    def serve(self, *args):
        server = Server("--cache-dir", os.path.join(self.dir, "cache"), *args)
        self.addCleanup(server.stop)
        return server.start()

    def open(self, server):
        self.browser.complaints()  # of the page before
        self.browser.open(server.url)
        wait_for("the page is connected", lambda: self.browser.text("link") == "Connected")

    def picture(self, name, is_whole=True):
        if PICTURES:
            os.makedirs(PICTURES, exist_ok=True)
            self.browser.picture(os.path.join(PICTURES, name), is_whole)

    def assert_sound(self):
        """No script failed, nothing was blocked or missing. A lost server is complained of, but not by us."""
        expected = re.compile(r"net::ERR_(CONNECTION|INCOMPLETE)|the server responded with a status of 4\d\d")
        self.assertEqual([m for m in self.browser.complaints() if not expected.search(m)], [])

    def assert_sentence(self, element_id, *parts):
        text = wait_for(f"'{element_id}' says {parts}", lambda: (t := self.browser.text(element_id)) and all(p in t for p in parts) and t)
        self.assertRegex(text, r"^['A-Z].*\.$")
        self.assertTrue(self.browser.run("return document.getElementById(arguments[0]).classList.contains('bad');", element_id))

    def draw_by_keyboard(self, n_before):
        self.browser.tab_to("prompt")
        self.browser.press("Enter")
        wait_for("a picture", lambda: len(self.browser.run(DRAWN)) > n_before, 60)
        return self.browser.run(DRAWN)[0]

    def fill(self, element_id, text):
        self.browser.tab_to(element_id)
        self.browser.run("document.activeElement.select();")
        self.browser.press(text)

    # ------------------------------------------------------------------------------------------------------------------

    def test_draws_and_changes_strengths_by_keyboard(self):
        b, server = self.browser, self.serve("--lora", "noto=noto:0.8", "--lora", "turbo=turbo", "--build-delay", "0.1")
        self.open(server)
        wait_for("overlay read", lambda: b.run(LETTERS) == "B" + 8 * "O")

        # A picture is the one that the API gives for the same seed, and its caption names what it was computed with.
        self.fill("steps", "4")
        self.fill("seed", "7")
        src, alt, caption, digest, width = self.draw_by_keyboard(0)
        composition = server.get("/v1/status")["composition"]
        _, same = server.ask("POST", "/v1/images/generations", {"prompt": "cat", "seed": 7, "num_inference_steps": 4})
        self.assertEqual(src, "data:image/png;base64," + same["data"][0]["b64_json"])
        self.assertEqual((digest, width), (composition, 32))
        self.assertIn(composition[:8], caption)
        self.assertRegex(caption, r"^cat, \d+\.\d+ s")
        self.assertIn("noto 0.8 + turbo 1", caption)
        self.assertIn("seed 7", alt)

        # A slider moves what the server applies, the map follows, and the next picture is another one.
        b.tab_to("s-noto")
        b.press("Right", "Right", "Right")
        wait_for("the strength is applied", lambda: server.strengths() == {"noto": 0.95, "turbo": 1})
        wait_for("the map moves to the new overlay", lambda: "noto 0.95" in b.text("composition") and b.run(LETTERS) == "B" + 8 * "O")
        moved = server.get("/v1/status")["composition"]
        self.assertIn(f"Set: noto 0.95 + turbo 1 ({moved[:8]}); 8 layers changed", b.text("log"))
        self.assertEqual(b.focused(), "s-noto")
        second = self.draw_by_keyboard(1)
        self.assertEqual(second[3], moved)
        self.assertNotEqual(second[0], src)

        # Strengths for one picture leave what the server applies alone.
        b.tab_to("own")
        b.press("Space")
        b.tab_to("own-noto")
        b.press("Home")
        third = self.draw_by_keyboard(2)
        self.assertIn("turbo 1", third[2])
        self.assertNotIn("noto", third[2])
        self.assertNotIn(third[3], (composition, moved))
        self.assertEqual(server.get("/v1/status")["composition"], moved)

        # Everything to 0 is the base.
        b.tab_to("s-noto")
        b.press("Home")
        b.tab_to("s-turbo")
        b.press("Home")
        wait_for("the map shows the base", lambda: b.run(LETTERS) == 9 * "B")
        self.assertEqual(server.strengths(), {})
        self.assert_sound()

    def test_buttons_errors_and_the_map_by_keyboard(self):
        b, server = self.browser, self.serve("--lora", "noto=noto:0.5", "--way", "stream")
        self.open(server)
        b.tab_to("unmerge")
        b.press("Enter")
        wait_for("unmerged", lambda: b.run(LETTERS) == 9 * "B" and "Remembered, not applied." in b.text("s-noto-note"))
        self.fill("factor", "2")
        b.tab_to("merge", shift=True)
        b.press("Enter")
        wait_for("merged", lambda: b.run(LETTERS) == "B" + 8 * "S" and server.strengths() == {"noto": 1})
        b.tab_to("deactivate")
        b.press("Space")
        wait_for("deactivated", lambda: b.run(LETTERS) == 9 * "B" and server.get("/v1/list_loras")["active"] == {})
        b.tab_to("merge", shift=True)
        b.press("Enter")
        self.assert_sentence("adapters-say", "remember")

        self.fill("prompt", "xyzzy")
        b.press("Enter")
        self.assert_sentence("draw-say", "xyzzy")
        self.fill("prompt", "cat")
        self.fill("count", "0")
        b.press("Enter")
        self.assert_sentence("draw-say", "from 1 to 64")
        self.assertEqual(b.focused(), "count")

        b.tab_to("unmerge")
        b.run("document.querySelector('#load-details summary').focus();")
        b.press("Enter")
        self.fill("load-path", "/etc/passwd")
        b.press("Enter")
        self.assert_sentence("adapters-say", "/etc/passwd")
        self.fill("load-path", "night")
        b.press("Enter")
        wait_for("loaded", lambda: b.run("return Boolean(document.getElementById('s-night'));"))

        b.tab_to("unmerge")
        wait_for("a cell has the focus", lambda: b.press("Tab") or b.run("return document.activeElement.className.includes('cell');"))
        b.press("Right", "Right", "Left")
        self.assertIn("transformer_blocks.0, 693 KiB: read from the base file;", b.text("cell-text"))
        b.press("End")
        self.assertIn("transformer_blocks.7", b.text("cell-text"))
        self.assert_sound()

    def test_a_slider_keeps_what_others_set_beside_the_strength(self):
        b, server = self.browser, self.serve("--lora", "noto=noto:0.5", "--lora", "turbo=turbo:0.5", "--way", "stream")
        self.open(server)
        body = {"lora_nickname": ["noto", "turbo"], "strength": [0.5, 0.5], "lora_alpha": [2.5, None], "merge_dtype": "f32"}
        self.assertEqual(server.ask("POST", "/v1/set_lora", body)[0], 200)
        wait_for("the page heard of it", lambda: "Set:" in b.text("log"))
        b.tab_to("s-noto")
        b.press("Right", "Right")
        wait_for("the strength is applied", lambda: server.strengths() == {"noto": 0.6, "turbo": 0.5})
        status = server.get("/v1/status")
        self.assertEqual(({a["nickname"]: a["alpha"] for a in status["adapters"]}, status["merge_dtype"]), ({"noto": 2.5, "turbo": None}, "f32"))

        # A picture with strengths of its own begins with what the server applies, precision included.
        self.assertEqual(server.ask("POST", "/v1/set_lora", {"lora_nickname": "noto", "strength": 0.5, "merge_dtype": "f32"})[0], 200)
        wait_for("the page follows", lambda: b.run("return document.getElementById('s-noto').value;") == "0.5")
        b.tab_to("own")
        b.press("Space")
        self.assertEqual(self.draw_by_keyboard(0)[3], server.get("/v1/status")["composition"])
        self.assert_sound()

    def test_can_be_read_and_reached(self):
        b, server = self.browser, self.serve("--lora", "noto=noto:0.8", "--lora", "turbo=turbo", "--build-delay", "0.1", "--workers", "1")
        self.open(server)
        seen = []
        while "log" not in seen:
            b.press("Tab")
            seen.append(b.focused())
            self.assertLess(len(seen), 60, seen)
            self.assertTrue(b.run("const s = getComputedStyle(document.activeElement); return s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) >= 2;"), seen)
        self.assertEqual(b.run("return ['header', 'main'].map((t) => getComputedStyle(document.querySelector(t)).backgroundColor);"), 2 * ["rgba(0, 0, 0, 0)"])
        order = [seen.index(i) for i in ("prompt", "draw-button", "count", "steps", "guidance", "seed", "own", "s-noto", "s-turbo", "unmerge", "merge", "factor", "log")]
        self.assertEqual(order, sorted(order), seen)

        b.run("document.activeElement.blur();")
        b.open(server.url)
        wait_for("the page is connected", lambda: b.text("link") == "Connected")
        self.fill("steps", "4")
        self.fill("guidance", "1")
        for i, thing in enumerate(("cat", "rocket", "rainbow", "snowman")):
            self.fill("prompt", thing)
            self.fill("seed", str(i))
            b.press("Enter")
            wait_for(thing, lambda n=i: len(b.run(DRAWN)) > n)
        b.run("document.activeElement.blur();")
        wait_for("overlay read", lambda: b.run(LETTERS) == "B" + 8 * "O")

        nodes = b.cdp("Accessibility.getFullAXTree")["nodes"]
        roles = {"textbox", "combobox", "spinbutton", "slider", "button", "checkbox", "option", "image", "progressbar", "listbox"}
        self.assertEqual([n["role"]["value"] for n in nodes if not n.get("ignored") and n["role"]["value"] in roles and not n.get("name", {}).get("value")], [])

        b.run("document.activeElement.blur(); scrollTo(0, 0);")
        for scheme in ("light", "dark"):
            b.prefer(scheme)
            self.assertEqual(b.run(CONTRAST), [], scheme)
            self.picture(f"page-{scheme}.png")
        b.prefer("light")
        b.size(360, 740, is_phone=True)
        self.assertLessEqual(b.run("return document.documentElement.scrollWidth;"), 360)
        small = "return [...document.querySelectorAll('button, input, summary, .cell')].filter((e) => e.checkVisibility() && e.getBoundingClientRect().height < 24" \
                " && e.type !== 'checkbox' && !e.closest('.legend')).map((e) => e.id || e.className);"
        self.assertEqual(b.run(small), [])
        self.picture("page-phone.png")
        self.assert_sound()

    def test_asks_for_the_key(self):
        path = os.path.join(self.dir, "key")
        with open(path, "w", encoding="ascii") as file:
            file.write(KEY + "\n")
        os.chmod(path, 0o600)
        b, server = self.browser, self.serve("--lora", "noto=noto:0.5", "--api-key-file", path)
        b.open(server.url)
        wait_for("the key is asked for", lambda: b.is_shown("key-dialog") and b.focused() == "key")
        b.press("not-the-key-but-something-else", "Enter")
        wait_for("the key is refused", lambda: "not accepted" in b.text("key-text"))
        b.press(KEY, "Enter")
        wait_for("connected", lambda: b.text("link") == "Connected" and not b.is_shown("key-dialog"))
        self.assertEqual(server.ask("POST", "/v1/set_lora", {"lora_nickname": "noto", "strength": 0.25}, KEY)[0], 200)
        wait_for("events come with the key", lambda: "Set:" in b.text("log") and b.run("return document.getElementById('s-noto').value;") == "0.25")

    def test_watches_a_build_and_survives_the_loss_of_the_server(self):
        if shutil.disk_usage(self.dir).free < N_ROOM_BYTES:
            print("SKIP: browser: less than 3 GiB are free for a model of 1 GB and its overlay")
            return
        model, adapter = os.path.join(self.dir, "model"), os.path.join(self.dir, "noise")
        for args in ((model,), ("--rank", "8", adapter)):
            subprocess.run([PAGEFLIP, "bench", "make", "--quiet", "--shape", "dit", "--scale", "0.125", *args], check=True, stdout=subprocess.DEVNULL)
        b = self.browser
        server = self.serve("--model", model, "--lora", f"noise={adapter}:0", "--build-delay", "0.3", "--build-rate", "120M")
        self.open(server)
        self.assertGreaterEqual(server.get("/model_info")["bytes"], N_MODEL_BYTES)
        self.assertEqual(b.run(LETTERS), 26 * "B")

        b.tab_to("s-noise")
        b.press("Right", "Right")
        wait_for("the map streams", lambda: b.run(LETTERS) == "B" + 25 * "S")
        wait_for("the build is shown", lambda: b.is_shown("build"))
        states, is_taken = [], False
        while b.run(LETTERS) != "B" + 25 * "O":
            state = b.run(CELLS)
            if state not in states and b.run(LETTERS) == "B" + 25 * "S":
                states.append(state)
            if not is_taken and len(states) > 12:
                is_taken = True
                self.picture("page-building.png")
            self.assertLess(len(states), 2000)
            time.sleep(0.05)
        between = [s for s in states if any("written" in c and "not written" not in c for c in s)]
        print(f"{len(between)} different maps were seen while the overlay was built")
        self.assertGreaterEqual(len(between), 5)
        written = [sum("written, not in use yet" in c for c in s) for s in between]
        self.assertEqual(written, sorted(written))  # it only ever grows
        wait_for("the log tells", lambda: re.search(r"An overlay of 900 MiB was built", b.text("log")))

        self.fill("steps", "1")
        self.fill("guidance", "1")
        composition = server.get("/v1/status")["composition"]
        self.assertEqual(self.draw_by_keyboard(0)[3], composition)

        self.fill("steps", "500")
        b.press("Enter")
        wait_for("steps are counted", lambda: re.search(r"Step \d+ of 500", b.text("pictures")), 60)
        b.tab_to("own")
        b.press("Tab", "Enter")  # the button of the picture that waits
        self.assert_sentence("draw-say", "cancelled")
        wait_for("the queue is empty", lambda: server.get("/v1/status")["queue"]["running"] == 0)
        self.assertEqual(len(b.run(DRAWN)), 1)
        self.fill("steps", "1")

        server.stop(signal.SIGKILL)
        wait_for("the loss is said", lambda: b.is_shown("lost") and "server" in b.text("lost-text") and b.text("link") == "Not connected")
        b.tab_to("prompt")
        b.press("Enter")
        self.assert_sentence("draw-say", "cannot be reached")
        self.picture("page-lost.png", is_whole=False)
        server.args = tuple(f"noise={adapter}:0.1" if a == f"noise={adapter}:0" else a for a in server.args)
        server.start()
        wait_for("the page is back by itself", lambda: b.text("link") == "Connected" and not b.is_shown("lost"))
        wait_for("the overlay is adopted", lambda: b.run(LETTERS) == "B" + 25 * "O")
        self.assertEqual(server.get("/v1/status")["composition"], composition)
        self.assertEqual(server.get("/v1/status")["cache"]["builds"], 0)
        self.draw_by_keyboard(1)
        self.assert_sound()


if __name__ == "__main__":
    unittest.main(verbosity=2)
