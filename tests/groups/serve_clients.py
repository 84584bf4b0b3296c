"""Clients that others wrote, against `pageflip serve`: openai, curl, SGLang's bodies, schemathesis. tests/groups/serve-python runs it.

Nothing here leaves loopback. The schemathesis run is bounded and seeded; any status from 500 up, and any answer that the document does
not describe, fails it."""
import base64
import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import unittest

import openai

from serving import ADAPTERS, Server

KEY = "a-key-for-clients-of-others"
LORAS = ("noto", "night", "turbo")
DRAW = {"num_inference_steps": 2, "guidance_scale": 1.5, "seed": 7}


def start(case, *args):
    server = Server(*args, tcp=True)
    case.addCleanup(server.clean)
    case.assertIn("url", server.said or {}, server.log())
    return server


class OpenAI(unittest.TestCase):
    """The real client, with a key, as its documentation says."""

    def setUp(self):
        keys = tempfile.NamedTemporaryFile("w", prefix="pf-keys-")
        self.addCleanup(keys.close)
        keys.write(KEY + "\n")
        keys.flush()
        self.server = start(self, "--api-key-file", keys.name)
        self.client = openai.OpenAI(base_url=self.server.said["url"] + "/v1", api_key=KEY, max_retries=0, timeout=120)
        self.addCleanup(self.client.close)

    def draw(self, **fields):
        extra = {**DRAW, **fields.pop("extra_body", {})}
        return self.client.images.generate(model="emoji-dit", prompt="a cat", extra_body=extra, **fields)

    def curl(self, path, body):
        out = subprocess.run(["curl", "-sS", "--fail-with-body", "-H", f"Authorization: Bearer {KEY}", "--json", json.dumps(body), self.server.said["url"] + path],
                             capture_output=True, check=False)
        self.assertEqual(out.returncode, 0, out.stdout + out.stderr)
        return json.loads(out.stdout)

    def test_draws_while_curl_switches_adapters(self):
        expected = {}  # composition -> its picture
        first = self.draw()
        expected[first.model_extra["composition"]] = first.data[0].b64_json
        for name in LORAS:
            digest = self.curl("/v1/set_lora", {"lora_nickname": name, "lora_path": name})["composition"]
            reply = self.draw()
            self.assertEqual(reply.model_extra["composition"], digest)
            expected[digest] = reply.data[0].b64_json
        self.assertEqual(len(set(expected.values())), 4)
        stop, n_switches, errors = threading.Event(), [0], []

        def switch():
            try:
                while not stop.is_set():
                    if n_switches[0] % 4 == 3:
                        self.curl("/v1/unmerge_lora_weights", {})
                    else:
                        self.curl("/v1/set_lora", {"lora_nickname": LORAS[n_switches[0] % 4]})
                    n_switches[0] += 1
            except Exception as e:  # pylint: disable=broad-except
                errors.append(e)

        thread = threading.Thread(target=switch)
        thread.start()
        seen = set()
        try:
            for i in range(400):
                reply = self.draw()
                digest = reply.model_extra["composition"]
                self.assertEqual(reply.data[0].b64_json, expected[digest], f"picture {i} is not that of {digest}")
                seen.add(digest)
                if i >= 40 and len(seen) == 4 and n_switches[0] >= 12:
                    break
        finally:
            stop.set()
            thread.join()
        self.assertEqual(errors, [])
        self.assertEqual(seen, set(expected))

    def test_fields(self):
        reply = self.draw(n=2, size="32x32", response_format="b64_json", user="somebody")
        self.assertEqual(len(reply.data), 2)
        for image in reply.data:
            self.assertEqual(base64.b64decode(image.b64_json)[:8], b"\x89PNG\r\n\x1a\n")
        self.assertNotEqual(reply.data[0].b64_json, reply.data[1].b64_json)
        self.assertGreater(reply.created, 1_600_000_000)
        self.assertGreaterEqual(reply.usage.total_tokens, 0)
        self.assertGreaterEqual(reply.usage.input_tokens_details.text_tokens, 0)
        self.assertGreater(reply.model_extra["peak_memory_mb"], 0)
        self.assertGreater(reply.model_extra["inference_time_s"], 0)
        self.assertIsInstance(reply.model_extra["id"], str)
        url = self.draw(response_format="url").data[0].url
        c = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=60)
        c.request("GET", re.sub(r"^http://[^/]+", "", url), headers={"Authorization": f"Bearer {KEY}"})
        self.assertEqual(c.getresponse().read()[:4], b"\x89PNG")
        c.close()

    def test_a_composition_of_its_own(self):
        base = self.draw()
        own = self.draw(extra_body={"loras": [{"path": "noto", "strength": 0.5}]})
        self.assertNotEqual(own.data[0].b64_json, base.data[0].b64_json)
        self.assertNotEqual(own.model_extra["composition"], base.model_extra["composition"])

    def test_models(self):
        self.assertEqual([m.id for m in self.client.models.list()], ["emoji-dit"])
        self.assertEqual(self.client.models.retrieve("emoji-dit").owned_by, "pageflip")
        with self.assertRaises(openai.NotFoundError) as caught:
            self.client.models.retrieve("gpt-9")
        self.assertEqual(caught.exception.code, "model_not_found")

    def test_errors_arrive_as_the_client_names_them(self):
        for fields, kind, param in (({"size": "31x32"}, openai.APIStatusError, "size"), ({"n": 0}, openai.APIStatusError, "n")):
            with self.assertRaises(kind) as caught:
                self.draw(**fields)
            self.assertIn(caught.exception.status_code, (400, 422))
            self.assertEqual(caught.exception.param, param)
            self.assertIn(param, caught.exception.message)
        with self.assertRaises(openai.AuthenticationError):
            openai.OpenAI(base_url=self.server.said["url"] + "/v1", api_key="another", max_retries=0).models.list()


class SGLang(unittest.TestCase):
    """The bodies of a client of SGLang's diffusion server; what comes back has at least its fields, of its types."""

    def setUp(self):
        self.server = start(self, "--adapter-dir", ADAPTERS)

    def sent(self, method, path, body=None):
        reply = self.server.request(method, path, body)
        self.assertEqual(reply.status, 200, (path, body, reply.body))
        return reply.json

    def change(self, path, body=None):
        doc = self.sent("POST", path, body)
        self.assertEqual(doc["status"], "ok")
        self.assertIsInstance(doc["message"], str)
        return doc

    def active(self):
        doc = self.sent("GET", "/v1/list_loras")
        for adapter in doc["loaded_adapters"]:
            self.assertIsInstance(adapter["nickname"], str)
            self.assertIsInstance(adapter["path"], str)
        for entries in doc["active"].values():
            for e in entries:
                self.assertEqual([type(e[k]) for k in ("nickname", "path", "merged", "mode")], [str, str, bool, str])
                self.assertIsInstance(e["strength"], (int, float))
        return {module: [(e["nickname"], e["strength"]) for e in entries] for module, entries in doc["active"].items()}

    def test_set_lora(self):
        path = os.path.join(ADAPTERS, "noto.safetensors")
        rows = (
            ({"lora_nickname": "a", "lora_path": path}, [("a", 1.0)]),
            ({"lora_nickname": "a", "lora_path": path, "target": "all", "strength": 0.8}, [("a", 0.8)]),
            ({"lora_nickname": "a", "lora_path": None, "target": ["transformer"], "strength": [0.5], "merge_mode": "dynamic"}, [("a", 0.5)]),
            ({"lora_nickname": ["a", "b"], "lora_path": [None, "night"], "strength": [1, 0.25], "target": "transformer", "merge_mode": None}, [("a", 1.0), ("b", 0.25)]),
            ({"lora_nickname": ["a", "b"], "strength": 0.5, "target": ["all", "all"], "lora_alpha": [None, 8], "merge_mode": "merge"}, [("a", 0.5), ("b", 0.5)]),
            ({"lora_nickname": "b", "lora_alpha": 4.5, "merge_mode": "auto"}, [("b", 1.0)]),
            ({"lora_nickname": "b", "lora_alpha": None, "lora_path": "night"}, [("b", 1.0)]),
        )
        for body, active in rows:
            doc = self.change("/v1/set_lora", body)
            self.assertIn("Successfully set LoRA adapter(s): ", doc["message"])
            self.assertIn("target: ", doc["message"])
            self.assertIn("strength: ", doc["message"])
            self.assertEqual({k: sorted(v) for k, v in self.active().items()}, {"transformer": sorted(active)}, body)

    def test_merge_and_unmerge(self):
        self.change("/v1/set_lora", {"lora_nickname": "n", "lora_path": "noto", "strength": 0.5})
        for body in (None, {}, {"target": "all"}, {"target": ["transformer"]}):
            self.change("/v1/unmerge_lora_weights", body)
        for body in ({}, {"target": "all", "strength": 1.0}, {"target": "transformer", "strength": 2}):
            self.change("/v1/merge_lora_weights", body)
        self.assertEqual(self.active(), {"transformer": [("n", 1.0)]})

    def test_small_routes(self):
        for path in ("/health", "/liveness", "/model_info", "/server_info"):
            self.assertIsInstance(self.sent("GET", path), dict)
        card = self.sent("GET", "/v1/models")["data"][0]
        self.assertEqual([type(card[k]) for k in ("id", "object", "created", "owned_by")], [str, str, int, str])
        self.assertEqual(self.sent("GET", "/v1/models/" + card["id"])["id"], card["id"])
        reply = self.server.get("/v1/models/nope")
        self.assertEqual((reply.status, reply.error["code"], sorted(reply.error)), (404, "model_not_found", ["code", "message", "param", "type"]))

    def test_images(self):
        doc = self.sent("POST", "/v1/images/generations", {"prompt": "a dog", "n": 1, "size": "32x32", "response_format": "b64_json", "user": "u", "model": "emoji-dit",
                                                           "num_inference_steps": 1, "guidance_scale": 1.0, "seed": 42})
        self.assertEqual([type(doc[k]) for k in ("id", "created", "data", "usage")], [str, int, list, dict])
        self.assertIsInstance(doc["data"][0]["b64_json"], str)
        self.assertIsInstance(doc["peak_memory_mb"], (int, float))
        self.assertIsInstance(doc["inference_time_s"], (int, float))
        doc = self.sent("POST", "/v1/images/generations", {"prompt": "a dog", "response_format": "url", "num_inference_steps": 1})
        self.assertRegex(doc["data"][0]["url"], "^http://")


class Schema(unittest.TestCase):
    """schemathesis over every operation: fuzzed, boundary and unacceptable values, 0 as the seed."""

    def test_schemathesis(self):
        server = start(self, "--deadline", "20", "--batch", "16", "--lora", "n=noto")
        work = tempfile.TemporaryDirectory(prefix="pf-schema-")
        self.addCleanup(work.cleanup)
        # /v1/events is a stream that does not end by itself: the tests of the command read it
        command = [os.path.join(os.path.dirname(sys.executable), "schemathesis"), "run", server.said["url"] + "/openapi.json", "--generation-deterministic",
                   "--max-examples", "60", "--phases", "coverage,fuzzing", "--request-timeout", "30", "--max-failures", "20", "--exclude-path", "/v1/events",
                   "--no-color", "--checks", "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,"
                   "response_schema_conformance,unsupported_method,negative_data_rejection"]
        env = {**os.environ, "SCHEMATHESIS_HOOKS": "serve_hooks", "PYTHONPATH": os.path.dirname(os.path.abspath(__file__))}
        out = subprocess.run(command, cwd=work.name, env=env, capture_output=True, text=True, timeout=240, check=False)
        self.assertEqual(out.returncode, 0, out.stdout[-20000:] + out.stderr)
        n_tested, n_cases = (int(re.search(pattern, out.stdout).group(1)) for pattern in (r"Tested: (\d+)", r"(\d+) generated"))
        self.assertGreaterEqual(n_tested, 23)
        self.assertGreaterEqual(n_cases, 1000)
        print(f"schemathesis: {n_tested} operations, {n_cases} requests")
        self.assertEqual(server.get("/health").status, 200)
        seen = set(re.findall(r'^pageflip_http_requests_total\{method="\w+",route="([^"]+)",code="200"', server.get("/metrics").body.decode(), re.M))
        for route in ("/v1/set_lora", "/v1/plan", "/v1/load_lora", "/v1/images/generations"):
            self.assertIn(route, seen)  # it got past the checks of the body


if __name__ == "__main__":
    unittest.main(verbosity=1)
