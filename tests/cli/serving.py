"""What the tests of `pageflip serve` share: a server per class on a UNIX socket or a free port, requests by http.client, raw sockets.

Server(...) starts it and waits for the line that says where it listens; as root it stays root, for the temp dir is root's."""
import base64
import http.client
import json
import os
import resource
import signal
import socket
import subprocess
import tempfile
import shutil
import threading
import time
import unittest

from cli import MODEL, PAGEFLIP, SOURCE

JSON = {"Content-Type": "application/json"}
ADAPTERS = os.path.join(SOURCE, "data", "adapters")
QUICK = {"num_inference_steps": 1, "guidance_scale": 1}
SLOW = {"num_inference_steps": 1000, "guidance_scale": 2}  # until it is cancelled


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path, timeout):
        super().__init__("localhost", timeout=timeout)
        self.path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


class Reply:
    def __init__(self, reply):
        self.status, self.headers, self.body = reply.status, reply.headers, reply.read()

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def error(self):
        return self.json["error"]


class Server:
    """tcp: listen on a free port instead of a socket. Not started well: `status` and `err` say why."""

    def __init__(self, *args, tcp=False, path=None, env=None, limits=None):
        self.dir = tempfile.mkdtemp(prefix="pf-serve-")
        self.path = None if tcp else path or os.path.join(self.dir, "s")
        where = ["--port", "0"] if tcp else ["--socket", self.path]
        if "--cache-dir" not in args:
            where += ["--cache-dir", os.path.join(self.dir, "cache")]
        def set_limits():
            for what, both in (limits or {}).items():
                resource.setrlimit(what, both)

        self.log_path = os.path.join(self.dir, "log")
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(
                [PAGEFLIP, "serve", "--json", *(() if "--user" in args else ("--user", "root")), *where, *map(str, args)],
                stdout=subprocess.PIPE, stderr=log, stdin=subprocess.DEVNULL, env={**os.environ, "TMPDIR": self.dir, **(env or {})},
                preexec_fn=set_limits if limits else None)
        line = self.process.stdout.readline()
        if line.strip() == b"{":  # an error, over several lines
            line += self.process.stdout.read()
        self.said = json.loads(line) if line else None
        self.port = self.said.get("port") if self.said else None
        if not self.said or "error" in self.said:
            self.process.wait(60)

    def log(self):
        with open(self.log_path, encoding="utf-8") as file:
            return file.read()

    def connection(self, timeout=120):
        return UnixConnection(self.path, timeout) if self.path else http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)

    def request(self, method, path, body=None, headers=None, connection=None):
        """body: a dict becomes JSON, bytes go as they are."""
        c = connection or self.connection()
        headers = dict(headers or {})
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
            headers = {**JSON, **headers}
        c.request(method, path, body, headers)
        reply = Reply(c.getresponse())
        if not connection:
            c.close()
        return reply

    def get(self, path, **headers):
        return self.request("GET", path, headers=headers)

    def post(self, path, body=None, **headers):
        return self.request("POST", path, body, headers)

    def draw(self, prompt="cat", quick=True, headers=None, **fields):
        return self.request("POST", "/v1/images/generations", {"prompt": prompt, **(QUICK if quick else {}), **fields}, headers)

    def raw(self, data, half=False, timeout=30):
        """Sends bytes, reads until the server closes or has said one whole response; with half, sends an end first."""
        s = socket.socket(socket.AF_UNIX) if self.path else socket.socket()
        s.settimeout(timeout)
        s.connect(self.path or ("127.0.0.1", self.port))
        out = b""
        try:
            s.sendall(data)
            if half:
                s.shutdown(socket.SHUT_WR)
            while True:
                more = s.recv(65536)
                if not more:
                    break
                out += more
                head, _, rest = out.partition(b"\r\n\r\n")
                n = [int(x.split(b":")[1]) for x in head.split(b"\r\n") if x.lower().startswith(b"content-length:")]
                if n and len(rest) >= n[0]:
                    break
        except ConnectionError:
            pass
        finally:
            s.close()
        return out

    def stop(self, sig=signal.SIGTERM):
        """The exit status, after a signal."""
        if self.process.poll() is None:
            self.process.send_signal(sig)
        return self.wait()

    def wait(self, timeout=120):
        status = self.process.wait(timeout)
        self.process.stdout.close()
        return status

    def clean(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        shutil.rmtree(self.dir, ignore_errors=True)


def wait_for(condition, seconds=60):
    """Polls the server's state; the bound only matters when something is broken."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


class Background(threading.Thread):
    """Runs a call and keeps what it returned."""

    def __init__(self, fn, *args, **kwargs):
        super().__init__(daemon=True)
        self.call, self.result, self.error = (fn, args, kwargs), None, None
        self.start()

    def run(self):
        try:
            self.result = self.call[0](*self.call[1], **self.call[2])
        except Exception as e:  # pylint: disable=broad-except
            self.error = e

    def wait(self, timeout=120):
        self.join(timeout)
        if self.error:
            raise self.error
        return self.result


class Events:
    """A listener: events() yields (name, data) until the stream ends."""

    def __init__(self, server):
        self.connection = server.connection(timeout=60)
        self.connection.request("GET", "/v1/events")
        self.reply = self.connection.getresponse()

    def events(self):
        name = None
        for line in self.reply:
            line = line.decode().rstrip("\n")
            if line.startswith("event: "):
                name = line[7:]
            elif line.startswith("data: "):
                yield name, json.loads(line[6:])

    def until(self, wanted):
        """The events up to the first that wanted(name, data) accepts."""
        seen = []
        for event in self.events():
            seen.append(event)
            if wanted(*event):
                return seen
        raise AssertionError(f"the stream ended: {seen}")

    def close(self):
        self.connection.sock.close() if self.connection.sock else None
        self.reply.close()
        self.connection.close()


def png(data):
    return base64.b64decode(data["b64_json"])


class ServeCase(unittest.TestCase):
    """One server for the whole class, back at the base before each test. ARGS: its options."""
    ARGS = ()
    TCP = False

    @classmethod
    def setUpClass(cls):
        cls.server = Server(*cls.ARGS, tcp=cls.TCP)
        cls.addClassCleanup(cls.server.clean)
        assert cls.server.said and "url" in cls.server.said, cls.server.log()

    def setUp(self):
        self.dir = tempfile.mkdtemp(prefix="pf-serve-")
        self.addCleanup(shutil.rmtree, self.dir, ignore_errors=True)

    def reset(self):
        """Nothing acts, nothing is loaded."""
        self.ok("/v1/deactivate_lora_weights", {})
        for adapter in self.server.get("/v1/list_loras").json["loaded_adapters"]:
            self.ok("/v1/unload_lora", {"lora_nickname": adapter["nickname"]})

    def ok(self, path, body=None, **headers):
        reply = self.server.post(path, body, **headers)
        self.assertEqual(reply.status, 200, reply.body)
        return reply.json

    def drawn(self, *args, **fields):
        reply = self.server.draw(*args, **fields)
        self.assertEqual(reply.status, 200, reply.body)
        return reply.json

    def refused(self, reply, status, code, param=None, text=""):
        self.assertEqual(reply.status, status, reply.body)
        self.assertEqual(list(reply.json), ["error"])
        self.assertEqual(sorted(reply.error), ["code", "message", "param", "type"])
        self.assertEqual(reply.error["code"], code, reply.body)
        self.assertEqual(reply.error["param"], param, reply.body)
        self.assertIn(text, reply.error["message"])
        self.assertEqual(reply.headers["Content-Type"], "application/json")
        return reply


__all__ = ["ADAPTERS", "Background", "Events", "JSON", "MODEL", "QUICK", "Server", "ServeCase", "png"]
