"""The request boundary: framing, headers, methods, bodies, limits, Host, Origin, keys; the small routes; metrics; what dribbles."""
import json
import os
import re
import signal
import socket
import time
import unittest

from serving import JSON, Events, ServeCase, Server, wait_for

SANITIZED = bool(os.environ.get("PF_SANITIZE"))
HOST = b"Host: localhost\r\n"
POST = b"POST /v1/unmerge_lora_weights HTTP/1.1\r\n" + HOST + b"Content-Type: application/json\r\n"


def head(reply):
    return int(reply.split(b" ", 2)[1]) if reply.startswith(b"HTTP/1.1 ") else None


class Framing(ServeCase):
    def said(self, reply, what):
        """The error in an answer, of which there is one, and the connection ends with it."""
        top, _, body = reply.partition(b"\r\n\r\n")
        self.assertIn(b"\r\nConnection: close", top, what)
        self.assertIn(b"\r\nContent-Type: application/json", top, what)
        doc = json.loads(body)
        self.assertEqual(sorted(doc["error"]), ["code", "message", "param", "type"], what)
        return doc["error"]

    def test_what_could_be_read_in_two_ways_is_refused_before_the_body(self):
        tail = b"0\r\n\r\nGET /health HTTP/1.1\r\n" + HOST + b"\r\n"
        rows = {
            b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n" + tail: "both Content-Length and Transfer-Encoding",
            b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n" + tail: "both Content-Length and Transfer-Encoding",
            b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}": "more than one Content-Length",
            b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}": "more than one Content-Length",
            b"Content-Length: 2, 2\r\n\r\n{}": "a Content-Length that is no number",
            b"Content-Length: +2\r\n\r\n{}": "a Content-Length that is no number",
            b"Content-Length: 0x2\r\n\r\n{}": "a Content-Length that is no number",
            b"Content-Length: -1\r\n\r\n{}": "a Content-Length that is no number",
            b"Content-Length:\r\n\r\n{}": "a Content-Length that is no number",
            b"Content-Length: 99999999999999999999999\r\n\r\n{}": "a Content-Length that is no number",
            b"Content-Length : 2\r\n\r\n{}": "a header name",
            b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n" + tail: "more than one Transfer-Encoding",
            b"Transfer-Encoding: gzip, chunked\r\n\r\n" + tail: "not 'chunked'",
            b"Transfer-Encoding: xchunked\r\n\r\n" + tail: "not 'chunked'",
            b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n": "chunks are not framed well",
            b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}x\r\n0\r\n\r\n": "chunks are not framed well",
            b"Transfer-Encoding: chunked\r\n\r\n2;" + b"a" * 100000 + b"\r\n{}\r\n0\r\n\r\n": "chunks are not framed well",
            b"Transfer-Encoding: chunked\r\n\r\n0\r\nno colon\r\n\r\n": "without a colon",
        }
        for data, text in rows.items():
            reply = self.server.raw(POST + data)
            self.assertEqual(head(reply), 400, data)
            self.assertNotIn(b"200 OK", reply, data)  # the rest is not taken for a request
            self.assertIn(text, self.said(reply, data)["message"])

    def test_plain_framing_works(self):
        for data in (b"Content-Length: 2\r\n\r\n{}", b"Content-Length: 0\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
                     b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n1\r\n}\r\n0\r\nHost: elsewhere\r\n\r\n"):
            self.assertEqual(head(self.server.raw(POST + data)), 200, data)
        self.assertEqual(head(self.server.raw(b"GET /health HTTP/1.0\r\n\r\n")), 200)
        self.assertEqual(head(self.server.raw(b"GET /health?x=1 HTTP/1.1\r\n" + HOST + b"X:\r\nY:  z  \r\n\r\n")), 200)

    def test_a_half_closed_client_gets_its_answer(self):
        self.assertEqual(head(self.server.raw(b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n", half=True)), 200)

    def test_a_nul_reaches_no_decision(self):
        for data in (b"GET /health HTTP/1.1\r\nHost: localhost\0.evil\r\n\r\n", b"GET /health HTTP/1.1\r\nHost: localhost\0.evil\r\nA: b\r\n\r\n",
                     b"GET /health HTTP/1.1\r\n" + HOST + b"Authorization: Bearer x\0y\r\n\r\n", b"GET /health HTTP/1.1\r\n" + HOST + b"X: a\0\r\n\r\n",
                     b"GET /health HTTP/1.1\r\n" + HOST + b"X: \0\0\r\nY: z\r\n\r\n", b"GET /health HTTP/1.1\r\n" + HOST + b"X\0Y: a\r\n\r\n",
                     b"GET /health\0x HTTP/1.1\r\n" + HOST + b"\r\n", b"GET /health\0?x HTTP/1.1\r\n" + HOST + b"\r\n", b"GET\0 /health HTTP/1.1\r\n" + HOST + b"\r\n"):
            self.assertNotEqual(head(self.server.raw(data)), 200, data)
        self.assertEqual(self.server.get("/health%00x").status, 404)

    def test_odd_headers_are_refused(self):
        for data in (HOST + b"X: a\r\n b\r\n\r\n", HOST + HOST + b"\r\n", b"\r\n", HOST + b"X: a\x01b\r\n\r\n", b"Host: localhost\rX: y\r\n\r\n", HOST + b"foo\r\n\r\n",
                     b" X: y\r\n" + HOST + b"\r\n", HOST + b": y\r\n\r\n", HOST + b"Cookie: " + b"a=b; " * 100 + b"\r\n\r\n", HOST + b"Cookie: a=\"\r\n\r\n"):
            reply = self.server.raw(b"GET /health HTTP/1.1\r\n" + data)
            self.assertEqual((head(reply), self.said(reply, data)["code"]), (400, "bad_request"), data)

    def test_odd_first_lines_are_refused(self):
        for line in (b"GET http://evil/health HTTP/1.1", b"GET health HTTP/1.1", b"OPTIONS * HTTP/1.1", b"GET /health", b"GET /health HTTP/2.0", b"PRI * HTTP/2.0", b"GET /health http/1.1",
                     b"GET /health HTTP/1.1 ", b"GET  /health HTTP/1.1", b"GET\t/health\tHTTP/1.1", b" GET /health HTTP/1.1", b"GET /he\x01alth HTTP/1.1", b"\x16\x03\x01\x02",
                     b"GET /health?" + b"a&" * 100 + b" HTTP/1.1"):
            reply = self.server.raw(line + b"\r\n" + HOST + b"\r\n")
            self.assertEqual((head(reply), self.said(reply, line)["code"]), (400, "bad_request"), line)
        self.assertEqual(head(self.server.raw(b"\x16\x03\x01\x02\x00")), 400)  # what is no HTTP need not go on
        line = [line for line in self.server.log().splitlines() if " - - 400 " in line]
        self.assertGreater(len(line), 10)

    def test_heads_may_come_in_pieces_and_one_behind_the_other(self):
        ask = b"\r\nGET /health HTTP/1.1\r\n" + HOST + b"\r\n"
        with socket.socket(socket.AF_UNIX) as s:
            s.settimeout(30)
            s.connect(self.server.path)
            for i in range(len(ask)):
                s.sendall(ask[i:i + 1])
            s.sendall(ask * 3 + b"GET /liveness HTTP/1.1\r\nConnection: close\r\n" + HOST + b"\r\n")
            out = b""
            while more := s.recv(65536):
                out += more
        self.assertEqual(out.count(b"HTTP/1.1 200 OK"), 5)

    def test_headers_and_paths_are_bounded(self):
        get = b"GET /health HTTP/1.1\r\n" + HOST
        self.assertEqual(head(self.server.raw(get + b"X: " + b"a" * 16000 + b"\r\n\r\n")), 200)
        self.assertEqual(head(self.server.raw(b"GET /health?" + b"a" * 4000 + b" HTTP/1.1\r\n" + HOST + (b"X: " + b"a" * 250 + b"\r\n") * 63 + b"\r\n")), 200)
        for data, code in ((get + b"X: " + b"a" * 17000, "headers_too_large"), (get + b"X: " + b"a" * 100000, "headers_too_large"), (get + b"X: a\r\n" * 100, "headers_too_large"),
                           (get + b"X: " + b" " * 100000, "headers_too_large"), (get + b"X: a\r\n" * 10000, "headers_too_large"), (b"GET /" + b"a" * 3000 + b" HTTP/1.1\r\n" + HOST, "path_too_long"),
                           (b"GET /health?" + b"a" * 5000 + b" HTTP/1.1\r\n" + HOST, "path_too_long"), (b"GET /" + b"a" * 100000, "path_too_long"), (b"G" * 5000, "path_too_long")):
            reply = self.server.raw(data + b"\r\n\r\n")
            self.assertEqual((head(reply), self.said(reply, data[:60])["code"]), (431 if "headers" in code else 414, code), data[:60])

    def test_bodies_are_bounded(self):
        for headers in (b"Content-Length: 2000000\r\n\r\n" + b" " * 2000000, b"Content-Length: 99999999999\r\n\r\n", b"Content-Length: 20000000\r\nExpect: 100-continue\r\n\r\n",
                        b"Transfer-Encoding: chunked\r\n\r\n" + (b"10000\r\n" + b" " * 65536 + b"\r\n") * 20 + b"0\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\nfffffffff\r\n{}"):
            reply = self.server.raw(POST + headers)
            self.assertEqual(head(reply), 413, headers[:60])
            self.assertEqual(json.loads(reply.split(b"\r\n\r\n", 1)[1])["error"]["code"], "body_too_large")
        c = self.server.connection()  # the connection is good for more after a refused body
        self.assertEqual(self.server.request("POST", "/v1/set_lora", b" " * 1100000, JSON, connection=c).status, 413)
        self.assertEqual(self.server.request("GET", "/health", connection=c).status, 200)
        c.close()

    def test_expect_is_answered(self):
        s = socket.socket(socket.AF_UNIX)
        s.connect(self.server.path)
        s.settimeout(30)
        s.sendall(POST + b"Content-Length: 2\r\nExpect: 100-continue\r\n\r\n")
        self.assertIn(b"100 Continue", s.recv(1000))
        s.sendall(b"{}")
        self.assertIn(b"200 OK", s.recv(1000))
        s.close()


class Small(ServeCase):
    def test_health_liveness_ready(self):
        for path in ("/health", "/liveness"):
            self.assertEqual(self.server.get(path).json, {"status": "ok", "changes_in_progress": 0, "draining": False})
        self.assertEqual(self.server.get("/ready").json, {"status": "ready"})

    def test_models(self):
        doc = self.server.get("/v1/models").json
        self.assertEqual((doc["object"], [sorted(m) for m in doc["data"]]), ("list", [["created", "id", "object", "owned_by"]]))
        self.assertEqual(self.server.get("/v1/models/emoji-dit").json, doc["data"][0])
        self.refused(self.server.get("/v1/models/gpt-9"), 404, "model_not_found", "model", "emoji-dit")
        self.refused(self.server.get("/v1/models/%00"), 404, "model_not_found", "model")

    def test_model_info_and_server_info(self):
        info = self.server.get("/model_info").json
        self.assertEqual((info["width"], info["height"], info["layers"], len(info["classes"])), (32, 32, 9, 64))
        info = self.server.get("/server_info").json
        self.assertEqual((info["targets"], info["bundled_adapters"], info["needs_key"]), (["transformer"], ["night", "noto", "turbo"], False))

    def test_status(self):
        self.reset()
        doc = self.server.get("/v1/status").json
        self.assertEqual([layer["name"] for layer in doc["layers"]][:2], ["stem", "transformer_blocks.0"])
        for layer in doc["layers"]:
            self.assertEqual((layer["place"], layer["residency"]), ("base", "kept"))
            self.assertIn(layer["cached"], ("yes", "partly", "no", "unknown"))
        self.assertGreater(doc["memory"]["anon_bytes"], 1 << 20)
        self.assertIn("kept", doc["memory"]["plan"])

    def test_methods_and_paths(self):
        self.refused(self.server.get("/nowhere"), 404, "not_found")
        self.assertEqual(self.refused(self.server.get("/v1/set_lora"), 405, "method_not_allowed").headers["Allow"], "POST")
        self.assertEqual(self.refused(self.server.post("/health", {}), 405, "method_not_allowed").headers["Allow"], "GET")
        reply = self.server.request("HEAD", "/health")
        self.assertEqual((reply.status, reply.body), (200, b""))
        self.assertEqual(self.server.request("HEAD", "/v1/events").status, 200)
        self.assertEqual(self.server.request("BREW", "/health").status, 405)

    def test_request_ids(self):
        self.assertEqual(self.server.get("/health", **{"X-Request-Id": "my-id_1.2"}).headers["X-Request-Id"], "my-id_1.2")
        a, b = (self.server.get("/health").headers["X-Request-Id"] for _ in range(2))
        self.assertNotEqual(a, b)
        for bad in ("a b", "a/b", "x" * 129, "ü"):
            self.refused(self.server.get("/health", **{"X-Request-Id": bad}), 400, "bad_request_id")

    def test_the_page_and_its_policy(self):
        for path, kind in (("/", "text/html"), ("/style.css", "text/css"), ("/app.js", "text/javascript")):
            reply = self.server.get(path)
            self.assertEqual(reply.status, 200)
            self.assertIn(kind, reply.headers["Content-Type"])
            self.assertIn("default-src 'none'", reply.headers["Content-Security-Policy"])
            self.assertEqual(reply.headers["X-Content-Type-Options"], "nosniff")

    def test_openapi(self):
        doc = self.server.get("/openapi.json").json
        self.assertEqual(doc["openapi"], "3.1.0")
        self.assertEqual(len(doc["paths"]), 25)

    def test_the_log_has_one_line_per_request(self):
        self.server.get("/nowhere/a%0Ab", **{"X-Request-Id": "log-me"})
        lines = []
        wait_for(lambda: lines or lines.extend(line for line in self.server.log().splitlines() if line.endswith("log-me")))  # after the answer
        self.assertEqual(len(lines), 1)
        self.assertRegex(lines[0], r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z GET /nowhere/a%0Ab 404 [\d.]+ms \d+B log-me$")

    def test_metrics(self):
        self.server.get("/nowhere")
        self.assertEqual(self.server.draw().status, 200)
        self.ok("/v1/set_lora", {"lora_nickname": "n", "lora_path": "noto"})
        reply = self.server.get("/metrics")
        self.assertTrue(reply.headers["Content-Type"].startswith("text/plain; version=0.0.4"))
        text = reply.body.decode()
        seen = {}
        for line in text.splitlines():
            self.assertRegex(line, r'^(# (HELP|TYPE) \w+ .+|\w+(\{(\w+="[^"]*",?)+\})? -?[0-9.e+-]+)$')
            if not line.startswith("#"):
                seen[line.rsplit(" ", 1)[0]] = float(line.rsplit(" ", 1)[1])
        self.assertEqual(sum(seen[f'pageflip_view_changes_total{{kind="set",way="{way}"}}'] for way in ("stream", "overlay")), 1)
        self.assertGreaterEqual(seen['pageflip_generations_total{end="drawn"}'], 1)
        self.assertGreaterEqual(seen['pageflip_http_requests_total{method="other",route="other",code="404"}'], 1)
        self.assertGreaterEqual(seen['pageflip_http_requests_total{method="POST",route="/v1/images/generations",code="200"}'], 1)
        self.assertEqual(sum(seen[f'pageflip_layer_places{{place="{place}"}}'] for place in ("stream", "overlay")), 8)
        self.assertGreater(seen["pageflip_weight_bytes_total"], 1 << 20)
        types = re.findall(r"^# TYPE (\w+) ", text, re.M)
        self.assertEqual(len(types), len(set(types)))


class Doors(unittest.TestCase):
    KEY = "a-key-of-enough-letters"

    def start(self, *args, tcp=True):
        server = Server(*args, tcp=tcp)
        self.addCleanup(server.clean)
        return server

    def test_host_and_origin(self):
        server = self.start("--allowed-host", "draw.example", "--cors-origin", "https://app.example")
        own = f"127.0.0.1:{server.port}"
        self.assertEqual(server.said["url"], "http://" + own)
        for host, status in ((own, 200), (f"localhost:{server.port}", 200), ("draw.example", 200), ("evil.example", 403), ("", 403)):
            self.assertEqual(server.get("/health", Host=host).status, status, host)
        self.assertEqual(server.get("/health", Host="evil.example").error["code"], "host_not_allowed")
        for origin, status in ((f"http://{own}", 200), ("http://evil.example", 403), ("null", 403), ("https://app.example", 200)):
            reply = server.get("/health", Origin=origin)
            self.assertEqual(reply.status, status, origin)
            self.assertEqual(reply.headers.get("Access-Control-Allow-Origin"), origin if "app" in origin else None)
        self.assertEqual(server.post("/v1/deactivate_lora_weights", {}, Origin="http://evil.example").error["code"], "origin_not_allowed")
        reply = server.request("OPTIONS", "/v1/set_lora", headers={"Origin": "https://app.example", "Access-Control-Request-Method": "POST"})
        self.assertEqual((reply.status, reply.headers["Access-Control-Allow-Methods"]), (204, "POST"))
        self.assertEqual(server.request("OPTIONS", "/v1/set_lora").status, 405)

    def test_a_body_that_is_not_json_is_415(self):
        server = self.start()
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "application/jsonx", ""):
            reply = server.request("POST", "/v1/deactivate_lora_weights", b"{}", {"Content-Type": kind})
            self.assertEqual((reply.status, reply.error["code"]), (415, "unsupported_media_type"), kind)
        reply = server.request("POST", "/v1/deactivate_lora_weights", b"{}", {"Content-Type": "application/json", "Content-Encoding": "gzip"})
        self.assertEqual((reply.status, "Content-Encoding" in reply.error["message"]), (415, True))
        self.assertEqual(server.request("POST", "/v1/deactivate_lora_weights", b"{}", {"Content-Type": "Application/JSON; charset=utf-8"}).status, 200)

    def with_key(self, *args, tcp=True):
        path = os.path.join(self.dir(), "keys")
        with open(path, "w", encoding="utf-8") as file:
            file.write("# mine\n" + self.KEY + "\n")
        os.chmod(path, 0o600)
        return self.start("--api-key-file", path, *args, tcp=tcp)

    def dir(self):
        import shutil
        import tempfile
        path = tempfile.mkdtemp(prefix="pf-keys-")
        self.addCleanup(shutil.rmtree, path, ignore_errors=True)
        return path

    def test_a_key_is_asked_for(self):
        server = self.with_key()
        key = {"Authorization": "Bearer " + self.KEY}
        for path in ("/health", "/liveness", "/ready", "/", "/app.js", "/style.css"):
            self.assertEqual(server.get(path).status, 200, path)
        for path in ("/v1/models", "/v1/status", "/v1/list_loras", "/metrics", "/model_info", "/server_info", "/v1/events", "/openapi.json", "/v1/images/files/x"):
            reply = server.get(path)
            self.assertEqual((reply.status, reply.error["code"], reply.headers["WWW-Authenticate"]), (401, "invalid_api_key", "Bearer"), path)
            if path not in ("/v1/events", "/v1/images/files/x"):
                self.assertEqual(server.get(path, **key).status, 200, path)
        for wrong in ("Bearer x", "Bearer " + self.KEY + "x", "Bearer " + self.KEY[:-1], "Basic " + self.KEY, self.KEY):
            self.assertEqual(server.draw(headers={"Authorization": wrong}).status, 401)
        self.assertEqual(server.draw(headers=key).status, 200)
        self.assertEqual(server.request("DELETE", "/v1/jobs/x").status, 401)
        self.assertNotIn(self.KEY, server.log())

    def test_another_address_needs_a_key_or_insecure(self):
        server = self.start("--address", "0.0.0.0")
        self.assertIn("--api-key-file or --insecure", server.said["error"]["message"])
        server = self.start("--address", "0.0.0.0", "--insecure")
        self.assertEqual(server.get("/health").status, 200)
        self.assertIn("there is no key", server.log())
        server = self.start("--address", "example.com")
        self.assertIn("no IP address", server.said["error"]["message"])
        self.assertEqual(self.with_key("--address", "0.0.0.0").get("/health").status, 200)

    def test_a_socket_in_use_is_not_taken_and_a_stale_one_is(self):
        first = self.start(tcp=False)
        self.assertEqual(os.stat(first.path).st_mode & 0o777, 0o600)

        class Again(Server):  # the same path
            def __init__(self):
                super().__init__("--socket-mode", "0660", path=first.path)

        second = Again()
        self.addCleanup(second.clean)
        self.assertIn("another process listens", second.said["error"]["message"])
        self.assertEqual(first.get("/health").status, 200)
        first.process.send_signal(signal.SIGKILL)
        first.process.wait()
        self.assertTrue(os.path.exists(first.path))
        third = Again()
        self.addCleanup(third.clean)
        self.assertEqual(third.get("/health").status, 200)
        self.assertEqual(os.stat(first.path).st_mode & 0o777, 0o660)
        self.assertEqual(third.stop(), 0)
        self.assertFalse(os.path.exists(first.path))


    def test_a_socket_that_is_too_busy_to_accept_is_in_use(self):
        path = os.path.join(self.dir(), "s")
        other, clients = socket.socket(socket.AF_UNIX), []
        self.addCleanup(other.close)
        other.bind(path)
        other.listen(0)
        try:
            while True:  # until nobody more may wait
                clients.append(socket.socket(socket.AF_UNIX))
                self.addCleanup(clients[-1].close)
                clients[-1].setblocking(False)
                clients[-1].connect(path)
        except BlockingIOError:
            pass
        server = Server(path=path)
        self.addCleanup(server.clean)
        self.assertIn("another process listens", server.said["error"]["message"])

    def test_what_is_no_socket_stays(self):
        path = os.path.join(self.dir(), "s")
        with open(path, "w", encoding="utf-8") as file:
            file.write("mine")
        server = Server(path=path)
        self.addCleanup(server.clean)
        self.assertIn("is no socket", server.said["error"]["message"])
        with open(path, encoding="utf-8") as file:
            self.assertEqual(file.read(), "mine")

    def test_a_server_that_ends_leaves_the_socket_of_its_successor(self):
        first = self.start(tcp=False)
        os.unlink(first.path)
        second = Server(path=first.path)
        self.addCleanup(second.clean)
        self.assertEqual(first.stop(), 0)
        self.assertEqual(second.get("/health").status, 200)


class Endurance(unittest.TestCase):
    """Clients that misbehave: the server keeps answering, and memory and descriptors come back."""

    def start(self, *args, **kwargs):
        server = Server(*args, **kwargs)
        self.addCleanup(server.clean)
        self.assertIn("url", server.said)
        return server

    def state(self, server):
        pid = server.process.pid
        with open(f"/proc/{pid}/status", encoding="utf-8") as file:
            anon = int(re.search(r"RssAnon:\s+(\d+)", file.read()).group(1))
        return anon, len(os.listdir(f"/proc/{pid}/fd"))

    def settled(self, server, n_fds):
        end, state = time.monotonic() + 30, self.state(server)
        while state[1] > n_fds and time.monotonic() < end:
            time.sleep(0.05)
            state = self.state(server)
        return state

    def test_dribbling_clients_are_cut_off(self):
        server = self.start("--headers-timeout", "1", "--body-timeout", "1")
        open_sockets = []
        for data in (b"GET /hea", POST + b"Content-Length: 100\r\n\r\n{", b""):
            s = socket.socket(socket.AF_UNIX)
            s.connect(server.path)
            s.settimeout(0.1)
            s.sendall(data)
            open_sockets.append(s)
        end, n_ok = time.monotonic() + 20, 0
        while open_sockets and time.monotonic() < end:
            self.assertEqual(server.get("/health").status, 200)
            n_ok += 1
            for s in list(open_sockets):
                try:
                    s.sendall(b"a")  # a byte now and then keeps no connection alive
                    if s.recv(1000) == b"":
                        raise ConnectionError
                except socket.timeout:
                    pass
                except ConnectionError:
                    open_sockets.remove(s)
                    s.close()
        self.assertEqual(open_sockets, [])

    def test_connections_opened_and_dropped(self):
        server = self.start("--connections", "64")
        self.assertEqual(server.get("/health").status, 200)
        _, n_fds = self.state(server)
        for i in range(2000):
            s = socket.socket(socket.AF_UNIX)
            s.connect(server.path)
            if i % 3 == 0:
                s.sendall(b"GET /health HTTP/1.1\r\n" + (HOST + b"\r\n" if i % 2 else b""))
            s.close()
            if i % 500 == 0:
                self.assertEqual(server.get("/health").status, 200)
        before = self.settled(server, n_fds)
        for _ in range(2000):
            s = socket.socket(socket.AF_UNIX)
            s.connect(server.path)
            s.close()
        anon, n = self.settled(server, n_fds)
        self.assertLessEqual(n, n_fds)
        if not SANITIZED:  # which keep what was freed
            self.assertLess(anon, before[0] + 2048)

    def test_idle_connections_give_way_to_requests(self):
        server = self.start("--connections", "32")
        idle = []
        for _ in range(100):
            s = socket.socket(socket.AF_UNIX)
            s.connect(server.path)
            idle.append(s)
        self.assertEqual(server.get("/health").status, 200)
        for s in idle:
            s.close()

    def test_a_listener_that_does_not_read_costs_a_bounded_amount(self):
        server = self.start()
        listeners = [Events(server) for _ in range(4)]
        before = self.state(server)[0]
        for _ in range(300):
            self.assertEqual(server.post("/v1/set_lora", {"lora_nickname": "n" * 200, "lora_path": "noto"}).status, 200)
            server.post("/v1/deactivate_lora_weights")
        if not SANITIZED:
            self.assertLess(self.state(server)[0], before + 8192)
        for events in listeners:
            events.close()
        reply = None
        end = time.monotonic() + 30
        while time.monotonic() < end:
            reply = re.search(r"^pageflip_event_listeners (\d+)$", server.get("/metrics").body.decode(), re.M).group(1)
            if reply == "0":
                break
        self.assertEqual(reply, "0")


if __name__ == "__main__":
    unittest.main()
