"""Two replicas and one overlay cache behind nginx ($PF_NGINX), configured by the text of docs/guide/replicas.md: tests/groups/nginx runs it."""
import base64
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import unittest

from cli import SOURCE
from serving import Server

HOST = "draw.example"
OWN = [[{"path": "noto"}], [{"path": "night", "strength": 0.5}], []]
AROUND = """daemon off;
{user}worker_processes 1;
pid {dir}/pid;
error_log {dir}/error.log;
events {{ worker_connections 256; }}
http {{
    access_log off;
    client_body_temp_path {dir}/body; proxy_temp_path {dir}/proxy; fastcgi_temp_path {dir}/f; uwsgi_temp_path {dir}/u; scgi_temp_path {dir}/s;
{conf}
}}
"""


class Replicas(unittest.TestCase):
    def setUp(self):
        self.dir = tempfile.mkdtemp(prefix="pf-replicas-")
        self.addCleanup(shutil.rmtree, self.dir, ignore_errors=True)
        self.replicas = [self.replica("a"), self.replica("b")]
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        with open(os.path.join(SOURCE, "docs", "guide", "replicas.md"), encoding="utf-8") as file:
            conf = re.search(r"^```nginx\n(.*?)^```$", file.read(), re.M | re.S).group(1)
        self.assertIn("/run/pageflip/a.sock", conf)
        conf = conf.replace("/run/pageflip/", self.dir + "/").replace("127.0.0.1:8080", f"127.0.0.1:{self.port}")
        path = os.path.join(self.dir, "nginx.conf")
        with open(path, "w", encoding="utf-8") as file:
            file.write(AROUND.format(dir=self.dir, conf=conf, user="user root;\n" if os.geteuid() == 0 else ""))
        self.nginx = subprocess.Popen([os.environ["PF_NGINX"], "-p", self.dir, "-e", os.path.join(self.dir, "error.log"), "-c", path])
        self.addCleanup(self.nginx.wait)
        self.addCleanup(self.nginx.terminate)
        end = time.monotonic() + 30
        while time.monotonic() < end and self.nginx.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                break
            except OSError:
                time.sleep(0.02)

    def replica(self, name):
        server = Server("--allowed-host", HOST, "--cache-dir", os.path.join(self.dir, "cache"), "--lora", "n=noto", "--build-delay", "600", "--log", "none",
                        path=os.path.join(self.dir, name + ".sock"))
        self.addCleanup(server.clean)
        self.assertIn("url", server.said or {}, server.log())
        return server

    def ask(self, method, path, body=None):
        c = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        c.request(method, path, json.dumps(body) if body is not None else None, {"Host": HOST, **({"Content-Type": "application/json"} if body is not None else {})})
        reply = c.getresponse()
        status, text = reply.status, reply.read()
        c.close()
        return status, text

    def draw(self, i):
        status, text = self.ask("POST", "/v1/images/generations", {"prompt": "cat", "seed": 1, "num_inference_steps": 4, "guidance_scale": 1, "loras": OWN[i % 3]})
        doc = json.loads(text) if status == 200 else {}
        return status, doc.get("composition"), doc and base64.b64decode(doc["data"][0]["b64_json"])

    def drawn_by(self):
        return [int(re.search(r"^pageflip_pictures_total (\d+)", r.get("/metrics").body.decode(), re.M).group(1)) for r in self.replicas]

    def test_pictures_do_not_depend_on_the_replica(self):
        self.assertEqual(self.ask("GET", "/health")[0], 200)
        seen, lock = {}, threading.Lock()

        def some(first):
            for i in range(first, first + 8):
                status, digest, picture = self.draw(i)
                with lock:
                    seen.setdefault((status, digest), set()).add(picture)

        threads = [threading.Thread(target=some, args=(k,)) for k in range(6)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        self.assertEqual({status for status, _ in seen}, {200})
        self.assertEqual([len(pictures) for pictures in seen.values()], [1, 1, 1])
        self.assertTrue(all(n > 0 for n in self.drawn_by()), self.drawn_by())

    def test_one_builds_and_the_other_adopts(self):
        digests = set()
        for replica in self.replicas:
            reply = replica.post("/v1/set_lora", {"lora_nickname": "n", "strength": 0.5, "merge_mode": "merge"})
            self.assertEqual((reply.status, reply.json["way"]), (200, "overlay"))
            digests.add(reply.json["composition"])
        self.assertEqual(len(digests), 1)
        caches = [r.get("/v1/status").json["cache"] for r in self.replicas]
        self.assertEqual(sum(c["builds"] for c in caches), 1)
        self.assertEqual(caches[1]["adoptions"], 1)

    def test_a_replica_may_leave_and_come_back(self):
        ending, states, lock = threading.Event(), [], threading.Lock()

        def go_on(first):
            i = first
            while not ending.is_set():
                status = self.draw(i)[0]
                i += 1
                with lock:
                    states.append(status)

        threads = [threading.Thread(target=go_on, args=(k,)) for k in range(6)]
        for t in threads:
            t.start()

        def wait_for_more(n):
            n, end = len(states) + n, time.monotonic() + 60
            while len(states) < n and time.monotonic() < end:
                time.sleep(0.02)
            self.assertGreaterEqual(len(states), n)

        wait_for_more(12)
        self.replicas[0].process.send_signal(signal.SIGTERM)
        self.assertEqual(self.replicas[0].wait(), 0)
        wait_for_more(12)
        self.replicas[0] = self.replica("a")
        end = time.monotonic() + 60
        while not self.drawn_by()[0] and time.monotonic() < end:
            time.sleep(0.05)
        ending.set()
        for t in threads:
            t.join()
        self.assertGreater(self.drawn_by()[0], 0)
        self.assertEqual(set(states), {200})


if __name__ == "__main__":
    unittest.main()
