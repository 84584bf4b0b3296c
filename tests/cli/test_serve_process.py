"""The process: who it runs as, what it logs, how it tells its manager, how it starts again on its cache after a kill."""
import json
import os
import resource
import shutil
import signal
import socket
import tempfile
import unittest

from cli import MODEL
from serving import ADAPTERS, SLOW, Background, Server, png, wait_for


class Process(unittest.TestCase):
    def start(self, *args, **kwargs):
        server = Server(*args, **kwargs)
        self.addCleanup(server.clean)
        return server

    def dir(self, mode=0o700):
        path = tempfile.mkdtemp(prefix="pf-serve-")
        os.chmod(path, mode)
        self.addCleanup(shutil.rmtree, path, ignore_errors=True)
        return path

    def test_json_log(self):
        server = self.start("--log", "json")
        server.get("/nowhere", **{"X-Request-Id": "j-1"})
        server.stop()
        lines = [json.loads(line) for line in server.log().splitlines()]
        line = [line for line in lines if line["request_id"] == "j-1"][0]
        self.assertEqual((line["method"], line["path"], line["status"]), ("GET", "/nowhere", 404))
        self.assertGreaterEqual(line["ms"], 0)
        self.assertGreater(line["bytes"], 50)

    def test_few_descriptors_mean_few_connections(self):
        server = self.start("--connections", "1000", limits={resource.RLIMIT_NOFILE: (100, 600)})
        self.assertIn("only 600 descriptors are allowed: 64 connections", server.log())
        self.assertEqual(server.get("/health").status, 200)
        self.assertEqual(self.start("--connections", "1000", limits={resource.RLIMIT_NOFILE: (100, 4000)}).log(), "")

    def test_a_terminal_that_closes_leaves_nothing_behind(self):
        directory = self.dir()
        server = self.start(env={"TMPDIR": directory})
        self.assertEqual(server.draw(response_format="url").status, 200)
        self.assertEqual(len(os.listdir(directory)), 1)
        self.assertEqual(server.stop(signal.SIGHUP), 0)
        self.assertEqual((os.listdir(directory), os.path.exists(server.path)), ([], False))

    def test_a_request_that_becomes_whole_while_it_stops_is_answered(self):
        for path, body in (("/v1/images/generations", b'{"prompt": "cat"}'), ("/v1/set_lora", b'{"lora_nickname": "n", "lora_path": "noto"}')):
            server = self.start()
            s = socket.socket(socket.AF_UNIX)
            self.addCleanup(s.close)
            s.settimeout(60)
            s.connect(server.path)
            s.sendall(b"POST %s HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(body)))
            slow = Background(server.draw, quick=False, **SLOW)
            wait_for(lambda: server.get("/v1/status").json["queue"]["running"])
            server.process.send_signal(signal.SIGTERM)
            wait_for(lambda: server.get("/ready").status == 503)
            s.sendall(body)
            server.process.send_signal(signal.SIGTERM)  # at once, whatever is being drawn
            self.assertRegex(s.recv(65536), b"^HTTP/1.1 (200|409|503) ")  # it came in before, or while, or after the cutting
            self.assertEqual(slow.wait().status, 409)
            self.assertGreaterEqual(server.process.wait(60), 0, server.log())

    def test_nohup_is_respected(self):
        before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self.addCleanup(signal.signal, signal.SIGHUP, before)
        server = self.start()
        server.process.send_signal(signal.SIGHUP)
        self.assertEqual(server.get("/ready").status, 200)
        server.process.send_signal(signal.SIGHUP)
        self.assertEqual(server.draw().status, 200)
        self.assertEqual(server.stop(), 0)

    def test_no_log(self):
        server = self.start("--log", "none")
        server.get("/health")
        self.assertEqual(server.stop(), 0)
        self.assertEqual(server.log(), "")

    def test_the_manager_is_told(self):
        path = os.path.join(self.dir(), "notify")
        s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.addCleanup(s.close)
        s.bind(path)
        s.settimeout(60)
        server = self.start(env={"NOTIFY_SOCKET": path})
        self.assertIn(b"READY=1", s.recv(1000))
        self.assertEqual(server.stop(), 0)
        self.assertIn(b"STOPPING=1", s.recv(1000))

    @unittest.skipUnless(os.geteuid() == 0, "only root can become somebody else")
    def test_root_becomes_nobody(self):
        base = self.dir(0o755)
        cache = os.path.join(base, "cache")
        os.mkdir(os.path.join(base, "adapters"))
        shutil.copy(os.path.join(ADAPTERS, "noto.safetensors"), os.path.join(base, "adapters", "x.safetensors"))
        os.chmod(os.path.join(base, "adapters", "x.safetensors"), 0o644)
        os.mkdir(os.path.join(base, "run"))
        pictures = os.path.join(base, "pictures")
        server = self.start("--user", "nobody", "--adapter-dir", os.path.join(base, "adapters"), "--cache-dir", cache, "--picture-dir", pictures,
                            path=os.path.join(base, "run", "s"))
        self.assertIn("url", server.said)
        with open(f"/proc/{server.process.pid}/status", encoding="utf-8") as file:
            status = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
        self.assertEqual(len(set(status["Uid"].split())), 1)
        self.assertNotEqual(status["Uid"].split()[0], "0")
        self.assertEqual((status["CapEff"].strip("0"), status["NoNewPrivs"], status["Groups"].strip()), ("", "1", ""))
        self.assertNotEqual(os.stat(cache).st_uid, 0)
        reply = server.post("/v1/set_lora", {"lora_nickname": "x", "lora_path": "x.safetensors", "merge_mode": "merge"})
        self.assertEqual((reply.status, reply.json["way"]), (200, "overlay"), reply.body)
        self.assertEqual(server.draw(response_format="url").status, 200)
        self.assertEqual([os.stat(os.path.join(pictures, name)).st_uid for name in os.listdir(pictures)], [int(status["Uid"].split()[0])])
        # the model is root's file: the kernel would not tell the truth about its pages
        if os.stat(os.path.join(MODEL, "model_index.json")).st_uid == 0:
            self.assertEqual({layer["cached"] for layer in server.get("/v1/status").json["layers"] if layer["place"] == "base"}, {"unknown"})
        self.assertEqual(server.stop(), 0)

    @unittest.skipUnless(os.geteuid() == 0, "only root becomes somebody else")
    def test_an_unknown_user_is_said(self):
        server = self.start("--user", "nobody-of-that-name")
        self.assertIn("there is no user 'nobody-of-that-name'", server.said["error"]["message"])

    def test_a_killed_server_leaves_a_sound_cache(self):
        cache = os.path.join(self.dir(), "cache")
        server = self.start("--cache-dir", cache, "--build-delay", "0.001")
        first = server.post("/v1/set_lora", {"lora_nickname": "n", "lora_path": "noto", "merge_mode": "merge"}).json
        self.assertEqual(first["way"], "overlay")
        expected = png(server.draw(seed=3).json["data"][0])
        calls = [Background(server.draw, quick=False, num_inference_steps=500, loras=[{"path": "turbo", "strength": i + 1}]) for i in range(4)]
        while not server.get("/v1/status").json["queue"]["running"]:
            pass
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
        for call in calls:
            with self.assertRaises(Exception):
                call.wait()
        again = self.start("--cache-dir", cache, "--lora", "n=noto")
        status = again.get("/v1/status").json
        self.assertEqual((status["composition"], status["cache"]["builds"], status["cache"]["adoptions"]), (first["composition"], 0, 1))
        self.assertEqual(png(again.draw(seed=3).json["data"][0]), expected)


if __name__ == "__main__":
    unittest.main()
