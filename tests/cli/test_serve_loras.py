"""The adapter routes: fields and types of section 1, the additions, and that no listed misbehaviour is here."""
import os
import shutil
import unittest

from cli import f32, lora, ramp, write_safetensors
from serving import ADAPTERS, ServeCase, Server, png

BLOCK = "transformer_blocks.0.attn1.to_q"


class Loras(ServeCase):
    @classmethod
    def setUpClass(cls):
        import tempfile
        cls.adapters = tempfile.mkdtemp(prefix="pf-adapters-")
        cls.addClassCleanup(shutil.rmtree, cls.adapters, ignore_errors=True)
        cls.ARGS = ("--adapter-dir", cls.adapters)
        super().setUpClass()

    def setUp(self):
        super().setUp()
        self.reset()

    def made(self, name, modules=(BLOCK,), **kwargs):
        tensors = {}
        for module in modules:
            tensors.update(lora(module, 128, 128, **kwargs))
        write_safetensors(os.path.join(self.adapters, name), tensors)
        return name

    def active(self):
        return self.server.get("/v1/list_loras").json["active"].get("transformer", [])

    def composition(self):
        return self.server.get("/v1/status").json["composition"]

    # ------------------------------------------------------------------------------------ section 1

    def test_set_lora_has_the_fields(self):
        doc = self.ok("/v1/set_lora", {"lora_nickname": "n", "lora_path": "noto", "target": "all", "strength": 0.8, "merge_mode": "auto"})
        self.assertEqual(doc["status"], "ok")
        self.assertTrue(doc["message"].startswith("Successfully set LoRA adapter(s): n (target: all, strength: 0.8)"), doc)
        for field, kind in (("composition", str), ("layers_changed", int), ("keys_matched", int), ("keys_unmatched", int), ("took_ms", float),
                            ("peak_anon_mib", float), ("way", str), ("survival", float)):
            self.assertIsInstance(doc[field], kind, field)
        self.assertEqual(len(doc["composition"]), 32)
        self.assertEqual(doc["layers_changed"], 8)
        self.assertEqual(doc["keys_unmatched"], 0)
        self.assertEqual(doc["composition"], self.composition())

    def test_one_nickname_is_one_file(self):
        self.refused(self.server.post("/v1/set_lora", {"lora_nickname": ["x", "x"], "lora_path": ["noto", "turbo"]}), 422, "invalid_field", "lora_path", "'x' comes twice")
        self.ok("/v1/set_lora", {"lora_nickname": ["x", "x"], "lora_path": ["noto", "noto"]})

    def test_list_loras_has_the_fields_and_every_strength(self):
        self.assertEqual(self.server.get("/v1/list_loras").json, {"loaded_adapters": [], "active": {}})
        self.ok("/v1/set_lora", {"lora_nickname": ["n", "t"], "lora_path": ["noto", "turbo"], "strength": [0.5, 2], "merge_mode": "dynamic"})
        doc = self.server.get("/v1/list_loras").json
        self.assertEqual(doc["loaded_adapters"], [{"nickname": "n", "path": "noto"}, {"nickname": "t", "path": "turbo"}])
        self.assertEqual(doc["active"], {"transformer": [
            {"nickname": "n", "path": "noto", "merged": True, "mode": "dynamic", "strength": 0.5},
            {"nickname": "t", "path": "turbo", "merged": True, "mode": "dynamic", "strength": 2.0}]})

    def test_status_has_the_composition(self):
        self.assertEqual(self.server.get("/v1/status").json["adapters"], [])
        self.ok("/v1/set_lora", {"lora_nickname": ["n", "t"], "lora_path": ["noto", "turbo"], "strength": [0.5, 2], "lora_alpha": [None, 4.5], "merge_dtype": "f32"})
        self.ok("/v1/merge_lora_weights", {"strength": 0.5})
        doc = self.server.get("/v1/status").json
        self.assertEqual((doc["merge_dtype"], doc["adapters"]), ("f32", [
            {"nickname": "n", "path": "noto", "target": "transformer", "strength": 0.25, "alpha": None, "merged": True},
            {"nickname": "t", "path": "turbo", "target": "transformer", "strength": 1.0, "alpha": 4.5, "merged": True}]))
        self.ok("/v1/unmerge_lora_weights")
        self.assertEqual([(a["strength"], a["merged"]) for a in self.server.get("/v1/status").json["adapters"]], [(0.5, False), (2.0, False)])

    def test_merge_mode_maps_to_the_way(self):
        self.assertEqual(self.ok("/v1/set_lora", {"lora_nickname": "n", "lora_path": "noto", "merge_mode": "dynamic"})["way"], "stream")
        doc = self.ok("/v1/set_lora", {"lora_nickname": "n", "merge_mode": "merge"})
        self.assertEqual(doc["way"], "overlay", doc)
        self.assertEqual(self.active()[0]["mode"], "merge")
        places = {layer["place"] for layer in self.server.get("/v1/status").json["layers"]}
        self.assertIn("overlay", places)
        self.assertNotIn("stream", places)

    def test_lists_go_by_position_and_scalars_stand_for_all(self):
        one = self.ok("/v1/set_lora", {"lora_nickname": ["n", "t"], "lora_path": ["noto", "turbo"], "strength": 0.5})
        two = self.ok("/v1/set_lora", {"lora_nickname": ["n", "t"], "strength": [0.5, 0.5], "target": ["all", "transformer"], "lora_path": [None, None]})
        self.assertEqual(one["composition"], two["composition"])
        three = self.ok("/v1/set_lora", {"lora_nickname": ["t", "n"], "strength": [0.5, 0.5]})
        self.assertEqual(one["composition"], three["composition"])
        for field, value, n in (("strength", [1], 1), ("target", ["all"] * 3, 3), ("lora_path", ["noto"], 1), ("lora_alpha", [1, 2, 3], 3)):
            reply = self.server.post("/v1/set_lora", {"lora_nickname": ["n", "t"], field: value})
            self.refused(reply, 422, "invalid_field", field, f"{n} items and 'lora_nickname' has 2")

    def test_a_nickname_without_a_path_must_be_loaded(self):
        self.refused(self.server.post("/v1/set_lora", {"lora_nickname": "n"}), 404, "notfound", "lora_nickname", "'n'")
        self.ok("/v1/load_lora", {"lora_nickname": "n", "lora_path": "noto"})
        self.assertEqual(self.active(), [])
        self.ok("/v1/set_lora", {"lora_nickname": "n", "lora_path": None})
        self.assertEqual([a["nickname"] for a in self.active()], ["n"])

    def test_another_path_reloads(self):
        first = self.ok("/v1/set_lora", {"lora_nickname": "n", "lora_path": "noto"})["composition"]
        second = self.ok("/v1/set_lora", {"lora_nickname": "n", "lora_path": "turbo"})["composition"]
        self.assertNotEqual(first, second)
        self.assertEqual(self.server.get("/v1/list_loras").json["loaded_adapters"], [{"nickname": "n", "path": "turbo"}])

    def test_merge_and_unmerge(self):
        base = self.composition()
        self.refused(self.server.post("/v1/merge_lora_weights", {}), 409, "state", None, "nothing is remembered")
        on = self.ok("/v1/set_lora", {"lora_nickname": "n", "lora_path": "noto"})["composition"]
        off = self.ok("/v1/unmerge_lora_weights")  # without a body
        self.assertEqual((off["composition"], off["way"], off["status"]), (base, "base", "ok"))
        self.assertEqual([a["merged"] for a in self.active()], [False])
        self.assertEqual(self.ok("/v1/merge_lora_weights", {"target": "all", "strength": 1.0})["composition"], on)
        self.assertEqual(self.ok("/v1/deactivate_lora_weights")["composition"], base)
        self.assertEqual(self.active(), [])
        self.assertEqual(self.server.post("/v1/merge_lora_weights").status, 409)

    # ------------------------------------------------------------------- what goes wrong elsewhere

    def test_client_errors_are_not_500(self):
        rows = ((b"{", 400, "invalid_json"), (b"", 400, "body_missing"), (b"[1]", 422, "invalid_field"), (b'{"a": 1}', 422, "invalid_field"),
                (b'{"lora_nickname": "n", "strength": NaN}', 400, "invalid_json"), (b'{"lora_nickname": "n", "strength": 1e999}', 400, "invalid_json"),
                (b'{"lora_nickname": "n", "lora_nickname": "m"}', 400, "invalid_json"), (b'{"lora_nickname": "\xff"}', 400, "invalid_json"),
                (b"[" * 2000, 400, "invalid_json"), (b'{"lora_nickname": ""}', 422, "invalid_field"))
        for body, status, code in rows:
            reply = self.server.post("/v1/set_lora", body, **{"Content-Type": "application/json"})
            self.assertEqual((reply.status, reply.error["code"]), (status, code), body[:60])
        self.refused(self.server.post("/v1/set_lora", {"lora_nickname": "n", "lora_path": "noto", "target": "vae"}), 404, "notfound", "target", "'vae'")

    def test_keys_that_match_nothing_are_an_error_that_lists_them(self):
        name = self.made("stray.safetensors", ("transformer_blocks.77.attn1.to_q",))
        reply = self.server.post("/v1/set_lora", {"lora_nickname": "s", "lora_path": name})
        self.refused(reply, 422, "unmatched", None, "transformer_blocks.77.attn1.to_q")
        self.assertEqual(self.active(), [])

    def test_a_failed_change_leaves_everything(self):
        before = self.ok("/v1/set_lora", {"lora_nickname": "n", "lora_path": "noto"})["composition"]
        stray = self.made("stray2.safetensors", ("transformer_blocks.77.attn1.to_q",))
        listed = self.server.get("/v1/list_loras").json
        for body in ({"lora_nickname": "n", "lora_path": stray}, {"lora_nickname": ["t", "s"], "lora_path": ["turbo", stray]},
                     {"lora_nickname": ["t", "x"], "lora_path": ["turbo", "nowhere"]}):
            self.assertGreaterEqual(self.server.post("/v1/set_lora", body).status, 400)
            self.assertEqual(self.server.get("/v1/list_loras").json, listed)
            self.assertEqual(self.composition(), before)

    def test_a_layer_that_the_new_adapter_misses_is_back_at_the_base(self):
        name = self.made("one.safetensors")
        self.ok("/v1/set_lora", {"lora_nickname": "n", "lora_path": "noto"})
        doc = self.ok("/v1/set_lora", {"lora_nickname": "one", "lora_path": name, "merge_mode": "dynamic"})
        self.assertEqual((doc["layers_changed"], doc["tensors_changed"]), (1, 1))
        places = {layer["name"]: layer["place"] for layer in self.server.get("/v1/status").json["layers"]}
        self.assertEqual(places["transformer_blocks.1"], "base")
        self.assertEqual(places["transformer_blocks.0"], "stream")

    def test_a_merge_factor_multiplies_and_the_state_says_so(self):
        self.ok("/v1/set_lora", {"lora_nickname": ["n", "t"], "lora_path": ["noto", "turbo"], "strength": [0.5, 2]})
        self.ok("/v1/merge_lora_weights", {"strength": 0.5})
        self.assertEqual([a["strength"] for a in self.active()], [0.25, 1.0])
        self.ok("/v1/merge_lora_weights", {"strength": 2})
        self.assertEqual([a["strength"] for a in self.active()], [1.0, 4.0])

    def test_what_acts_is_listed_with_the_path_that_it_was_made_with(self):
        self.ok("/v1/set_lora", {"lora_nickname": "n", "lora_path": "noto"})
        self.ok("/v1/load_lora", {"lora_nickname": "n", "lora_path": "turbo"})  # for later
        self.assertTrue(self.active()[0]["path"].endswith("/adapters/noto.safetensors"), self.active())  # it has no other name now
        self.assertEqual(self.server.get("/v1/list_loras").json["loaded_adapters"], [{"nickname": "n", "path": "turbo"}])
        self.ok("/v1/load_lora", {"lora_nickname": "m", "lora_path": "noto"})
        self.assertEqual([a["path"] for a in self.active()], ["noto"])

    def test_the_adapters_of_one_request_take_nobodys_nickname(self):
        noto = self.ok("/v1/set_lora", {"lora_nickname": "n", "lora_path": "noto"})["composition"]
        self.ok("/v1/load_lora", {"lora_nickname": "night", "lora_path": "turbo"})
        listed = self.server.get("/v1/list_loras").json
        drawn = {}
        for name, loras in (("n", [{"nickname": "n", "path": "night"}]), ("night", [{"path": "night"}]), ("both", [{"nickname": "a", "path": "night", "strength": 0.5}, {"nickname": "a", "path": "turbo"}])):
            drawn[name] = self.drawn(loras=loras)["composition"]
        self.assertEqual(drawn["n"], drawn["night"])
        self.assertEqual(self.server.get("/v1/list_loras").json["active"], listed["active"])
        loaded = {a["nickname"]: a["path"] for a in self.server.get("/v1/list_loras").json["loaded_adapters"]}
        self.assertEqual((loaded["n"], loaded["night"]), ("noto", "turbo"))
        self.assertEqual(self.ok("/v1/set_lora", {"lora_nickname": "n"})["composition"], noto)
        self.assertEqual(self.drawn(loras=[{"nickname": "n"}])["composition"], noto)

    def test_the_adapters_of_requests_that_are_over_make_room(self):
        for i in range(300):  # 256 nicknames are kept
            self.made(f"one-of-many-{i}.safetensors")
        self.ok("/v1/load_lora", {"lora_nickname": "kept", "lora_path": "one-of-many-0.safetensors"})
        for i in range(300):
            self.drawn(loras=[{"path": f"one-of-many-{i}.safetensors", "strength": 0}])
        loaded = {a["path"] for a in self.server.get("/v1/list_loras").json["loaded_adapters"]}
        self.assertEqual(len(loaded), 256)
        self.assertIn("one-of-many-0.safetensors", loaded)  # somebody named it
        self.assertNotIn("one-of-many-1.safetensors", loaded)
        oldest = min(loaded - {"one-of-many-0.safetensors"}, key=lambda name: int(name.split("-")[3].split(".")[0]))
        self.drawn(loras=[{"nickname": oldest, "strength": 0}])  # which makes it nobody's either
        self.ok("/v1/load_lora", {"lora_nickname": "more", "lora_path": "noto"})
        self.assertNotIn(oldest, {a["path"] for a in self.server.get("/v1/list_loras").json["loaded_adapters"]})
        self.reset()
        for i in range(256):
            self.ok("/v1/load_lora", {"lora_nickname": f"n{i}", "lora_path": "noto"})
        self.refused(self.server.post("/v1/load_lora", {"lora_nickname": "x", "lora_path": "turbo"}), 409, "busy", "lora_path", "unload one first")
        self.refused(self.server.draw(loras=[{"path": "turbo"}]), 409, "busy", "loras[0]", "unload one first")

    def test_a_fractional_alpha_counts(self):
        digests = {self.ok("/v1/set_lora", {"lora_nickname": "n", "lora_path": "noto", "lora_alpha": a})["composition"] for a in (4, 4.5, 4.75)}
        self.assertEqual(len(digests), 3)

    def test_a_file_that_changed_under_its_path_is_loaded_anew(self):
        name = self.made("change.safetensors", scale=0.01)
        first = self.ok("/v1/set_lora", {"lora_nickname": "c", "lora_path": name})["composition"]
        self.made("change.safetensors.new", scale=0.02)
        os.replace(os.path.join(self.adapters, "change.safetensors.new"), os.path.join(self.adapters, "change.safetensors"))
        self.assertNotEqual(self.ok("/v1/set_lora", {"lora_nickname": "c"})["composition"], first)
        os.unlink(os.path.join(self.adapters, "change.safetensors"))
        self.ok("/v1/set_lora", {"lora_nickname": "c"})  # what was loaded is still there

    def test_nan_in_an_adapter_is_refused(self):
        tensors = lora(BLOCK, 128, 128)
        key = BLOCK + ".lora_A.weight"
        tensors[key] = ("F32", [2, 128], f32([float("nan")]) + ramp(255, 0.01))
        write_safetensors(os.path.join(self.adapters, "nan.safetensors"), tensors)
        reply = self.server.post("/v1/load_lora", {"lora_nickname": "x", "lora_path": "nan.safetensors"})
        self.refused(reply, 422, "nonfinite", "lora_path", "lora_A")

    def test_load_and_unload(self):
        doc = self.ok("/v1/load_lora", {"lora_nickname": "n", "lora_path": "noto"})
        self.assertEqual((doc["status"], len(doc["digest"])), ("ok", 32))
        self.ok("/v1/set_lora", {"lora_nickname": "n"})
        self.refused(self.server.post("/v1/unload_lora", {"lora_nickname": "n"}), 409, "busy", "lora_nickname", "in use")
        self.ok("/v1/unmerge_lora_weights")
        self.assertEqual(self.server.post("/v1/unload_lora", {"lora_nickname": "n"}).status, 409)  # remembered
        self.ok("/v1/deactivate_lora_weights")
        self.ok("/v1/unload_lora", {"lora_nickname": "n"})
        self.refused(self.server.post("/v1/unload_lora", {"lora_nickname": "n"}), 404, "notfound", "lora_nickname", "'n'")

    def test_plan_changes_nothing(self):
        before = self.server.get("/v1/list_loras").json
        doc = self.ok("/v1/plan", {"lora_nickname": ["n", "t"], "lora_path": ["noto", "turbo"], "strength": [1, 0.5]})
        self.assertEqual((doc["layers_changed"], doc["keys_unmatched"], doc["would_be_refused"], doc["way"]), (8, 0, False, "stream"))
        self.assertGreater(doc["bytes_changed"], 1 << 20)
        self.assertEqual(self.server.get("/v1/list_loras").json, before)
        done = self.ok("/v1/set_lora", {"lora_nickname": ["n", "t"], "lora_path": ["noto", "turbo"], "strength": [1, 0.5]})
        self.assertEqual(done["composition"], doc["composition"])
        stray = self.made("mixed.safetensors", (BLOCK, "transformer_blocks.0.attn1.to_z"))
        doc = self.ok("/v1/plan", {"lora_nickname": "m", "lora_path": stray})
        self.assertTrue(doc["would_be_refused"])
        self.assertIn("to_z", doc["unmatched"][0]["key"])
        self.assertIn("to_", doc["unmatched"][0]["nearest"])
        self.refused(self.server.post("/v1/plan", {"lora_nickname": "x"}), 404, "notfound", "lora_nickname")

    def test_merge_dtype_is_part_of_the_composition(self):
        base = self.ok("/v1/set_lora", {"lora_nickname": "n", "lora_path": "noto"})
        exact = self.ok("/v1/set_lora", {"lora_nickname": "n", "merge_dtype": "f32"})
        self.assertNotEqual(base["composition"], exact["composition"])
        self.assertGreater(exact["survival"], 0.999999)

    def test_adapters_come_from_their_directories_only(self):
        os.symlink("/etc/passwd", os.path.join(self.adapters, "way-out"))
        self.addCleanup(os.unlink, os.path.join(self.adapters, "way-out"))
        for path in ("../x", "/etc/passwd", "/no/where", "way-out", ADAPTERS + "/noto.safetensors", "a/../../b"):
            for route, body in (("/v1/set_lora", {"lora_nickname": "x", "lora_path": path}), ("/v1/load_lora", {"lora_nickname": "x", "lora_path": path}),
                                ("/v1/plan", {"lora_nickname": "x", "lora_path": path})):
                self.refused(self.server.post(route, body), 403, "path_not_allowed", "lora_path", "outside")
            self.refused(self.server.draw(loras=[{"path": path}]), 403, "path_not_allowed", "loras[0]", "outside")
        self.refused(self.server.post("/v1/load_lora", {"lora_nickname": "x", "lora_path": "nowhere"}), 404, "notfound", "lora_path")
        name = self.made("fine.safetensors")
        os.symlink(name, os.path.join(self.adapters, "link.safetensors"))
        self.addCleanup(os.unlink, os.path.join(self.adapters, "link.safetensors"))
        self.ok("/v1/load_lora", {"lora_nickname": "x", "lora_path": "link.safetensors"})
        self.ok("/v1/load_lora", {"lora_nickname": "x", "lora_path": os.path.join(self.adapters, name)})


class CommandLine(unittest.TestCase):
    def start(self, *args):
        server = Server(*args)
        self.addCleanup(server.clean)
        return server

    def test_lora_is_applied_before_the_first_request(self):
        server = self.start("--lora", "night=" + os.path.join(ADAPTERS, "night") + ":0.8", "--lora", "n=noto:0.5")
        doc = server.get("/v1/list_loras").json
        self.assertEqual([(a["nickname"], a["strength"]) for a in doc["active"]["transformer"]], [("night", 0.8), ("n", 0.5)])
        with_loras = png(server.draw(seed=1).json["data"][0])
        self.assertEqual(server.post("/v1/deactivate_lora_weights").status, 200)
        self.assertNotEqual(png(server.draw(seed=1).json["data"][0]), with_loras)
        self.assertEqual(server.post("/v1/set_lora", {"lora_nickname": "night", "strength": 0.8}).status, 200)

    def test_bad_options_end_in_one_sentence(self):
        for args, status, text in ((["--lora", "noto"], 2, "NICKNAME=L"), (["--lora", "n=nowhere"], 1, "nowhere"), (["--adapter-dir", "/nowhere"], 1, "/nowhere"),
                                   (["--model", "/nowhere"], 1, "/nowhere"), (["--socket-mode", "9"], 2, "octal")):
            server = self.start(*args)
            self.assertEqual(server.process.poll(), status, server.log())
            self.assertIn(text, server.said["error"]["message"])


if __name__ == "__main__":
    unittest.main()
