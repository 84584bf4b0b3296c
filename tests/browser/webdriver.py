"""A browser for tests: chromedriver and chromium, both Debian's, driven by the W3C WebDriver protocol, which is JSON over HTTP.
Standard library only. Everything that is started here is ended here, by its process id, and lives in a folder of its own."""
import base64
import http.client
import json
import os
import shutil
import subprocess
import tempfile
import time

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key that the protocol gives references to elements
KEYS = {"Tab": "\ue004", "Enter": "\ue007", "Space": " ", "Left": "\ue012", "Up": "\ue013", "Right": "\ue014", "Down": "\ue015", "Home": "\ue011", "End": "\ue010",
        "Shift": "\ue008"}


class WebDriverError(Exception):
    pass


def wait_for(what, probe, timeout_s=20.0, every_s=0.05):
    """The first true value of probe(); what: for the message when there is none in time."""
    end = time.monotonic() + timeout_s
    while True:
        value = probe()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"waited {timeout_s} s in vain: {what}")
        time.sleep(every_s)


class Browser:
    def __init__(self):
        self.dir = tempfile.mkdtemp(prefix="pf-browser-")
        self.session = None
        with open(os.path.join(self.dir, "driver.log"), "wb") as log:
            self.process = subprocess.Popen(["chromedriver", "--port=0", "--log-level=SEVERE"], stdout=subprocess.PIPE, stderr=log, stdin=subprocess.DEVNULL,
                                            env={**os.environ, "HOME": self.dir, "TMPDIR": self.dir})
        try:
            self.port = self._port()
            self._start()
        except BaseException:
            self.close()
            raise

    def _port(self):
        for line in self.process.stdout:  # "ChromeDriver was started successfully on port 41234."
            if b"successfully on port" in line:
                return int(line.rstrip(b".\n").split()[-1])
        raise WebDriverError("chromedriver ended before it listened")

    def _start(self):
        args = ["--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--force-device-scale-factor=1", "--lang=en-GB", "--no-first-run",
                "--disable-background-networking", "--disable-component-update", "--disable-sync", f"--user-data-dir={self.dir}/profile"]
        if os.geteuid() == 0:
            args.append("--no-sandbox")  # chromium refuses to be root with it
        answer = self._call("POST", "/session", {"capabilities": {"alwaysMatch": {
            "browserName": "chrome", "goog:chromeOptions": {"args": args}, "goog:loggingPrefs": {"browser": "ALL"}}}})
        self.session = answer["sessionId"]

    def close(self):
        try:
            if self.session:
                self._call("DELETE", f"/session/{self.session}")
        except (OSError, WebDriverError, http.client.HTTPException):
            pass  # ended below
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        shutil.rmtree(self.dir, ignore_errors=True)

    def _call(self, method, path, body=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, json.dumps(body or {}) if method == "POST" else None, {"Content-Type": "application/json"})
            value = json.loads(connection.getresponse().read())["value"]
        finally:
            connection.close()
        if isinstance(value, dict) and "error" in value:
            raise WebDriverError(f"{path}: {value['error']}: {value['message'].splitlines()[0]}")
        return value

    def _in(self, method, path, body=None):
        return self._call(method, f"/session/{self.session}{path}", body)

    def open(self, url):
        self._in("POST", "/url", {"url": url})

    def run(self, script, *args):
        """The value of a function body, with `arguments`."""
        return self._in("POST", "/execute/sync", {"script": script, "args": list(args)})

    def cdp(self, command, **params):
        return self._in("POST", "/goog/cdp/execute", {"cmd": command, "params": params})

    def press(self, *keys, shift=False):
        """Keys go where the focus is, like a person's: names of KEYS, or text."""
        text = [c for key in keys for c in ([KEYS[key]] if key in KEYS else key)]
        actions = [{"type": kind, "value": c} for c in text for kind in ("keyDown", "keyUp")]
        if shift:
            actions = [{"type": "keyDown", "value": KEYS["Shift"]}, *actions, {"type": "keyUp", "value": KEYS["Shift"]}]
        self._in("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def focused(self):
        """The id of what has the focus, else its tag."""
        return self.run("const e = document.activeElement; return e.id || e.tagName.toLowerCase();")

    def tab_to(self, element_id, n_max=60, shift=False):
        """Presses Tab until the element has the focus: proof that the keyboard gets there. The ids that were passed."""
        passed = []
        while self.focused() != element_id:
            passed.append(self.focused())
            if len(passed) > n_max:
                raise AssertionError(f"the Tab key does not lead to '{element_id}', but to {passed}")
            self.press("Tab", shift=shift)
        return passed

    def text(self, element_id):
        return self.run("return document.getElementById(arguments[0]).textContent;", element_id)

    def is_shown(self, element_id):
        return self.run("return document.getElementById(arguments[0]).checkVisibility();", element_id)

    def size(self, width, height, is_phone=False):
        self.cdp("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=is_phone)

    def prefer(self, scheme):
        self.cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}, {"name": "prefers-reduced-motion", "value": "reduce"}])

    def picture(self, path, is_whole=False):
        clip = {}
        if is_whole:
            size = self.cdp("Page.getLayoutMetrics")["cssContentSize"]
            clip = {"captureBeyondViewport": True, "clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}
        data = base64.b64decode(self.cdp("Page.captureScreenshot", format="png", **clip)["data"])
        with open(path, "wb") as file:
            file.write(data)

    def complaints(self):
        """What the browser logged since the last time: scripts that failed, content that its policy blocked."""
        return [entry["message"] for entry in self._in("POST", "/se/log", {"type": "browser"})]
