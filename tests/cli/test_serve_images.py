"""Pictures: OpenAI's fields, compositions of one request, what a picture depends on, urls, cancelling, a full queue, deadlines, events."""
import glob
import os
import re
import shutil
import signal
import struct
import threading
import time
import unittest

from cli import Case
from serving import SLOW, Background, Events, ServeCase, Server, png, wait_for


class Images(ServeCase):
    def setUp(self):
        super().setUp()
        self.reset()

    def test_has_the_fields(self):
        reply = self.server.draw(n=2, size="32x32", response_format="b64_json", user="me", model="whatever", seed=3)
        self.assertEqual(reply.status, 200, reply.body)
        doc = reply.json
        self.assertEqual(doc["id"], reply.headers["X-Request-Id"])
        self.assertLess(abs(doc["created"] - time.time()), 100)
        self.assertEqual(len(doc["data"]), 2)
        for data in doc["data"]:
            picture = png(data)
            self.assertEqual(picture[:8], b"\x89PNG\r\n\x1a\n")
            self.assertEqual(struct.unpack(">II", picture[16:24]), (32, 32))
            self.assertEqual(data["revised_prompt"], "cat")
        self.assertNotEqual(doc["data"][0], doc["data"][1])
        self.assertGreater(doc["peak_memory_mb"], 0)
        self.assertGreater(doc["inference_time_s"], 0)
        self.assertIsInstance(doc["usage"], dict)
        self.assertEqual(doc["composition"], self.server.get("/v1/status").json["composition"])

    def test_draws_what_generate_draws(self):
        case = Case()
        case.setUp()
        self.addCleanup(case.doCleanups)
        path = case.path("x.png")
        case.ok("generate", "--prompt", "a cat", "--seed", "7", "--steps", "2", "--guidance-scale", "2", "--lora", "noto:0.5", "-o", path)
        with open(path, "rb") as file:
            expected = file.read()
        doc = self.drawn("a cat", quick=False, n=1.0, seed=7.0, num_inference_steps=2.0, guidance_scale=2, loras=[{"path": "noto", "strength": 0.5}])
        self.assertEqual(png(doc["data"][0]), expected)
        self.ok("/v1/set_lora", {"lora_nickname": "n", "lora_path": "noto", "strength": 0.5})
        again = self.drawn("a cat", quick=False, seed=7, num_inference_steps=2, guidance_scale=2)
        self.assertEqual((png(again["data"][0]), again["composition"]), (expected, doc["composition"]))

    def test_refusals_name_the_field(self):
        refused = self.refused
        reply = refused(self.server.draw("a zebra crossing"), 422, "no_class_for_prompt", "prompt", "")
        for word in ("zebra", "cat", "red_apple"):  # what was asked, and the list
            self.assertIn(word, reply.error["message"])
        self.assertRegex(refused(self.server.draw("a sailboot"), 422, "no_class_for_prompt", "prompt").error["message"], "near it .*'sailboat'")
        refused(self.server.draw(size="1024x1024"), 422, "size_not_supported", "size", "32x32")
        refused(self.server.draw(n=0), 422, "invalid_field", "n")
        refused(self.server.draw(response_format="jpeg"), 422, "invalid_field", "response_format")
        refused(self.server.draw(quality="hd"), 422, "invalid_field", "quality", "no field")
        refused(self.server.draw(loras=[{"nickname": "nobody"}]), 404, "notfound", "loras[0]", "nobody")
        refused(self.server.draw(loras=[{"strength": 1}]), 422, "invalid", "loras")
        refused(self.server.draw(loras=[{"path": "noto", "merge_dtype": "f32"}, {"path": "turbo", "merge_dtype": "base"}]), 422, "invalid", "loras[1].merge_dtype")
        refused(self.server.draw(loras=[{"path": "noto", "target": "vae"}]), 404, "notfound", "loras", "vae")

    def test_null_means_the_default(self):
        one = self.drawn(quick=False, num_inference_steps=2, n=None, size=None, guidance_scale=None, seed=None, response_format=None, user=None, model=None)
        self.assertEqual(png(one["data"][0]), png(self.drawn(quick=False, num_inference_steps=2, guidance_scale=2, seed=0)["data"][0]))
        self.assertEqual(self.drawn(size="auto")["data"], self.drawn()["data"])

    def test_loras_are_for_one_request_alone(self):
        base = self.drawn()
        self.ok("/v1/set_lora", {"lora_nickname": "n", "lora_path": "noto"})
        noto = self.drawn()
        own = self.drawn(loras=[{"path": "turbo", "strength": 1.5}])
        self.assertEqual(self.drawn(loras=[])["data"], base["data"])
        self.assertEqual(self.drawn(loras=[{"nickname": "n"}])["composition"], noto["composition"])
        self.assertEqual(self.drawn()["data"], noto["data"])
        self.assertEqual(len({base["composition"], noto["composition"], own["composition"]}), 3)
        self.assertEqual(len({png(d["data"][0]) for d in (base, noto, own)}), 3)
        self.assertNotEqual(self.drawn(loras=[{"nickname": "n", "merge_dtype": "f32"}])["composition"], noto["composition"])

    def test_a_picture_does_not_depend_on_company(self):
        """Requests that share a pass draw what each draws alone."""
        seeds = [1, 2, 3, 4, 5, 6]
        alone = [self.drawn(seed=s, n=1 + s % 2)["data"] for s in seeds]
        blocker = Background(self.server.draw, quick=False, headers={"X-Request-Id": "blocker"}, **SLOW)
        wait_for(lambda: self.server.get("/v1/status").json["queue"]["running"])
        calls = [Background(self.server.draw, seed=s, n=1 + s % 2) for s in seeds]
        wait_for(lambda: len(self.server.get("/v1/status").json["jobs"]) == 1 + len(seeds))
        self.assertEqual(self.server.request("DELETE", "/v1/jobs/blocker").status, 200)
        together = [call.wait().json["data"] for call in calls]
        self.assertEqual(together, alone)
        self.assertEqual(blocker.wait().status, 409)
        text = self.server.get("/metrics").body.decode()
        self.assertGreater(int(re.search(r"^pageflip_generations_shared_total (\d+)$", text, re.M).group(1)), 1)

    def test_urls_lead_to_the_same_bytes(self):
        url = self.drawn(response_format="url", seed=5)["data"][0]["url"]
        self.assertTrue(url.startswith("http://localhost/v1/images/files/"), url)
        reply = self.server.get(url[len("http://localhost"):])
        self.assertEqual((reply.status, reply.headers["Content-Type"]), (200, "image/png"))
        self.assertEqual(reply.body, png(self.drawn(seed=5)["data"][0]))
        for name in ("nothing.png", "..%2F..%2Fetc%2Fpasswd", "%00", "a" * 100):
            self.refused(self.server.get("/v1/images/files/" + name), 404, "notfound", "name")

    def test_a_generation_keeps_the_composition_it_was_accepted_with(self):
        base = self.drawn(quick=False, num_inference_steps=40)
        call = Background(self.server.draw, quick=False, num_inference_steps=40)
        wait_for(lambda: self.server.get("/v1/status").json["queue"]["running"])
        self.ok("/v1/set_lora", {"lora_nickname": "n", "lora_path": "noto"})  # while it runs
        after = self.drawn()
        doc = call.wait().json
        self.assertEqual((doc["composition"], doc["data"]), (base["composition"], base["data"]))
        self.assertNotEqual(after["composition"], base["composition"])

    def test_a_change_does_not_wait_for_a_generation(self):
        call = Background(self.server.draw, quick=False, headers={"X-Request-Id": "slow-one"}, **SLOW)
        wait_for(lambda: self.server.get("/v1/status").json["queue"]["running"])
        for route, body in (("/v1/set_lora", {"lora_nickname": "n", "lora_path": "noto"}), ("/v1/unmerge_lora_weights", None), ("/v1/deactivate_lora_weights", None)):
            self.ok(route, body)
        self.assertEqual(self.server.get("/v1/status").json["queue"]["running"], 1)
        self.assertEqual(self.server.request("DELETE", "/v1/jobs/slow-one").json["jobs_cancelled"], 1)
        self.refused(call.wait(), 409, "cancelled", None, "cancelled")

    def test_delete_cancels_a_waiting_job(self):
        slow = Background(self.server.draw, quick=False, headers={"X-Request-Id": "a"}, **SLOW)
        wait_for(lambda: self.server.get("/v1/status").json["queue"]["running"])
        waiting = Background(self.server.draw, headers={"X-Request-Id": "b/ü"[:1] + "-2"})
        wait_for(lambda: self.server.get("/v1/status").json["queue"]["waiting"])
        jobs = self.server.get("/v1/status").json["jobs"]
        self.assertEqual([(j["id"], j["state"]) for j in jobs], [("a", "running"), ("b-2", "queued")])
        self.assertEqual(self.server.request("DELETE", "/v1/jobs/b%2D2").status, 200)
        self.refused(waiting.wait(), 409, "cancelled")
        self.assertEqual(self.server.request("DELETE", "/v1/jobs/a").status, 200)
        self.refused(slow.wait(), 409, "cancelled")
        self.refused(self.server.request("DELETE", "/v1/jobs/a"), 404, "job_not_found", "id")

    def test_a_client_that_leaves_ends_its_generation(self):
        import json
        for _ in range(2):  # once running, once waiting behind it
            c = self.server.connection()
            c.request("POST", "/v1/images/generations", json.dumps({"prompt": "cat", **SLOW}), {"Content-Type": "application/json"})
            wait_for(lambda: self.server.get("/v1/status").json["queue"]["running"])
            d = self.server.connection()
            d.request("POST", "/v1/images/generations", json.dumps({"prompt": "dog", **SLOW}), {"Content-Type": "application/json"})
            wait_for(lambda: self.server.get("/v1/status").json["queue"]["waiting"])
            d.close()
            wait_for(lambda: not self.server.get("/v1/status").json["queue"]["waiting"])
            c.close()
            wait_for(lambda: not self.server.get("/v1/status").json["queue"]["running"])
        wait_for(lambda: re.search(r'pageflip_http_requests_total{method="POST",route="/v1/images/generations",code="499"} [1-9]', self.server.get("/metrics").body.decode()))

    def test_events_tell_of_views_jobs_and_steps(self):
        events = Events(self.server)
        self.addCleanup(events.close)
        self.assertEqual(events.reply.headers["Content-Type"], "text/event-stream")
        self.ok("/v1/set_lora", {"lora_nickname": "n", "lora_path": "noto"})
        self.server.draw(quick=False, num_inference_steps=3, headers={"X-Request-Id": "job-1"})
        seen = events.until(lambda name, data: name == "job" and data["state"] == "done")
        names = [name for name, _ in seen]
        self.assertEqual(names[0], "hello")
        # beside the set there may be placements: the overlay is adopted when drawing is slower than the build
        view, = (d for n, d in seen if n == "view" and d["kind"] != "placement")
        self.assertEqual((view["kind"], view["layers_changed"]), ("set", 8))
        self.assertIn(view["way"], ("stream", "overlay"))
        self.assertEqual([d["state"] for n, d in seen if n == "job"], ["queued", "running", "done"])
        self.assertEqual([(d["step"], d["steps"]) for n, d in seen if n == "step"], [(1, 3), (2, 3), (3, 3)])
        self.assertEqual({d["id"] for n, d in seen if n in ("job", "step")}, {"job-1"})
        self.assertEqual({d["composition"] for n, d in seen if n == "job"}, {view["composition"]})


class Bounds(unittest.TestCase):
    def start(self, *args):
        server = Server(*args)
        self.addCleanup(server.clean)
        self.assertIn("url", server.said)
        return server

    def test_a_full_queue_says_when_to_come_back(self):
        server = self.start("--queue", "2")
        calls = []
        for i in range(3):
            calls.append(Background(server.draw, quick=False, headers={"X-Request-Id": f"j{i}"}, loras=[{"path": "noto", "strength": 1 + i}], **SLOW))
            wait_for(lambda n=i: [j["state"] for j in server.get("/v1/status").json["jobs"]] == ["running"] + n * ["queued"])
        reply = server.draw()
        self.assertEqual((reply.status, reply.error["code"], reply.error["type"]), (429, "queue_full", "rate_limit_error"))
        self.assertGreaterEqual(int(reply.headers["Retry-After"]), 1)
        self.assertEqual(server.get("/health").status, 200)
        for i in range(3):
            self.assertEqual(server.request("DELETE", f"/v1/jobs/j{i}").status, 200)
        self.assertEqual({call.wait().status for call in calls}, {409})
        self.assertEqual(server.draw().status, 200)

    def test_a_deadline_ends_a_generation(self):
        server = self.start("--deadline", "4")  # enough for the second, never for the first
        reply = server.draw(quick=False, n=16, **SLOW)
        self.assertEqual((reply.status, reply.error["code"]), (504, "deadline"))
        self.assertEqual(server.draw().status, 200)

    def test_workers_draw_side_by_side(self):
        server = self.start("--workers", "2", "--threads", "2")
        calls = [Background(server.draw, quick=False, headers={"X-Request-Id": f"j{i}"}, loras=[{"path": "noto", "strength": 1 + i}], **SLOW) for i in range(2)]
        wait_for(lambda: server.get("/v1/status").json["queue"]["running"] == 2)
        for i in range(2):
            server.request("DELETE", f"/v1/jobs/j{i}")
        self.assertEqual({call.wait().status for call in calls}, {409})
        self.assertEqual(server.stop(), 0)

    def test_kept_pictures_have_a_budget(self):
        server = self.start("--picture-budget", "5000")
        urls = [server.draw(seed=s, response_format="url").json["data"][0]["url"] for s in range(4)]
        states = [server.get(u[len("http://localhost"):]).status for u in urls]
        self.assertEqual((states[0], states[-1]), (404, 200))
        two = server.draw(n=2, response_format="url")  # they fit as they are, not as large as such pictures can be
        self.assertEqual(two.status, 200, two.body)
        sizes = [len(server.get(d["url"][len("http://localhost"):]).body) for d in two.json["data"]]
        self.assertLessEqual(sum(sizes), 5000)
        self.assertGreater(2 * 32 * (1 + 3 * 32), 5000)
        last = two.json["data"][-1]["url"][len("http://localhost"):]
        reply = server.draw(n=8, response_format="url")  # the first would be gone before the answer
        self.assertEqual(server.get(last).status, 200)  # a refused answer drives out nobody's
        self.assertEqual((reply.status, reply.error["code"]), (422, "range"))
        self.assertIn("b64_json", reply.error["message"])
        self.assertEqual(server.draw(n=8).status, 200)

    def test_addresses_behind_a_proxy(self):
        server = self.start("--allowed-host", "draw.example")
        for scheme, want in (("https", "https://draw.example/"), ("HTTPS", "https://draw.example/"), ("ftp", "http://draw.example/")):
            reply = server.draw(response_format="url", headers={"Host": "draw.example", "X-Forwarded-Proto": scheme})
            self.assertTrue(reply.json["data"][0]["url"].startswith(want), reply.body)

    def test_a_directory_of_pictures_that_vanishes_is_not_the_clients_fault(self):
        server = self.start()
        for path in glob.glob(os.path.join(server.dir, "pageflip-pictures-*")):
            shutil.rmtree(path)
        self.assertEqual(server.draw(response_format="url").status, 500)
        self.assertEqual(server.draw().status, 200)

    def test_servers_share_a_directory_of_pictures(self):
        one = self.start()
        directory = one.dir + "/pictures"
        two = self.start("--picture-dir", directory)
        three = self.start("--picture-dir", directory)
        path = two.draw(response_format="url").json["data"][0]["url"][len("http://localhost"):]
        picture = two.get(path).body
        self.assertEqual(two.stop(), 0)
        self.assertEqual((three.get(path).body, one.get(path).status), (picture, 404))
        self.assertEqual(self.start("--picture-dir", directory).get(path).body, picture)

    def test_no_wrong_picture_while_compositions_change(self):
        """Many clients, several compositions, the global one switching all the time: each picture is the one of its digest."""
        server = self.start("--workers", "2", "--threads", "2", "--queue", "100")
        own = [None, [{"path": "noto"}], [{"path": "turbo", "strength": 0.5}], [{"path": "noto", "strength": -1}]]
        expected, wrong, stop = {}, [], threading.Event()
        states = [{"lora_nickname": "n", "lora_path": "noto"}, {"lora_nickname": "t", "lora_path": "turbo"}]
        for body in states:
            self.assertEqual(server.post("/v1/set_lora", body).status, 200)
            doc = server.draw(seed=1).json
            expected[doc["composition"]] = doc["data"]
        for loras in own[1:] + [[]]:
            doc = server.draw(seed=1, loras=loras).json
            expected[doc["composition"]] = doc["data"]

        def switch():
            i = 0
            while not stop.is_set():
                reply = server.post("/v1/set_lora", states[i % 2]) if i % 3 else server.post("/v1/unmerge_lora_weights")
                i += 1
                if reply.status != 200:
                    wrong.append(reply.body)

        def client(k):
            for i in range(6):
                loras = own[(k + i) % len(own)]
                reply = server.draw(seed=1, **({"loras": loras} if loras else {}))
                if reply.status != 200 or expected.get(reply.json["composition"]) != reply.json["data"]:
                    wrong.append(reply.body)

        switcher = Background(switch)
        clients = [Background(client, k) for k in range(8)]
        for c in clients:
            c.wait()
        stop.set()
        switcher.wait()
        self.assertEqual(wrong, [])


class Ends(unittest.TestCase):
    def start(self, *args):
        server = Server(*args)
        self.addCleanup(server.clean)
        self.assertIn("url", server.said)
        return server

    def test_a_stop_finishes_what_was_accepted(self):
        server = self.start()
        first = Background(server.draw, quick=False, headers={"X-Request-Id": "first"}, **SLOW)  # until all was looked at
        wait_for(lambda: server.get("/v1/status").json["queue"]["running"])
        call = Background(server.draw)
        wait_for(lambda: len(server.get("/v1/status").json["jobs"]) == 2)
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: server.get("/ready").status == 503)
        self.assertEqual(server.get("/health").json["draining"], True)
        reply = server.draw()
        self.assertEqual((reply.status, reply.error["code"]), (503, "draining"))
        self.assertIn("Retry-After", reply.headers)
        self.assertEqual(server.request("DELETE", "/v1/jobs/first").status, 200)
        self.assertEqual((first.wait().status, call.wait().status), (409, 200))
        self.assertEqual(server.wait(), 0)

    def test_a_drain_ends_at_its_deadline(self):
        server = self.start("--drain", "1")
        call = Background(server.draw, quick=False, **SLOW)
        wait_for(lambda: server.get("/v1/status").json["queue"]["running"])
        self.assertEqual(server.stop(), 0)
        self.assertEqual(call.wait().status, 409)
        self.assertIn("before every generation was finished", server.log())

    def test_a_second_signal_stops_at_once(self):
        server = self.start()
        events = Events(server)
        self.addCleanup(events.close)
        calls = [Background(server.draw, quick=False, **SLOW) for _ in range(3)]
        wait_for(lambda: len(server.get("/v1/status").json["jobs"]) == 3)  # all are accepted; one more would be told that the server drains
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: server.get("/ready").status == 503)
        self.assertEqual(server.stop(signal.SIGINT), 0)
        self.assertEqual({call.wait().status for call in calls}, {409})
        list(events.events())  # the stream has an end

    def test_health_shows_a_change_in_progress(self):
        server = self.start("--build-rate", "64K")
        base = server.get("/v1/status").json["composition"]
        waiting = Background(server.post, "/v1/set_lora", {"lora_nickname": "n", "lora_path": "noto", "merge_mode": "merge"})
        # It counts from its first moment on; superseded it can be from when its composition is published and it waits for the files.
        wait_for(lambda: server.get("/v1/status").json["composition"] != base)
        self.assertEqual(server.get("/health").json["changes_in_progress"], 1)
        self.assertEqual(server.post("/v1/deactivate_lora_weights", {}).status, 200)
        waiting.wait(60)
        self.assertEqual(server.get("/health").json["changes_in_progress"], 0)

    def test_a_path_is_free_when_its_change_is_published(self):
        """The engine's way is overlay, which the request does not say: others load meanwhile, whatever the build takes."""
        server = self.start("--way", "overlay", "--build-rate", "64K")
        base = server.get("/v1/status").json["composition"]
        waiting = Background(server.post, "/v1/set_lora", {"lora_nickname": "n", "lora_path": "noto"})
        wait_for(lambda: server.get("/v1/status").json["composition"] != base)
        self.assertEqual(server.post("/v1/load_lora", {"lora_nickname": "t", "lora_path": "turbo"}).status, 200)
        self.assertEqual(server.get("/health").json["changes_in_progress"], 1)
        self.assertEqual(server.post("/v1/deactivate_lora_weights", {}).status, 200)
        self.assertEqual(waiting.wait(60).status, 200)

    def test_a_change_that_waits_for_its_overlay_does_not_hold_up_the_end(self):
        server = self.start("--drain", "1", "--cache-dir", "off")
        self.assertEqual(server.post("/v1/set_lora", {"lora_nickname": "n", "lora_path": "noto", "merge_mode": "merge"}).status, 200)
        self.assertEqual(server.stop(), 0)


if __name__ == "__main__":
    unittest.main()
