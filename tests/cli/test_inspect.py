"""inspect: kind decided by content, JSON fields, what is odd, matching with a model."""
import json
import os
import shutil
import unittest

from cli import MODEL, WEIGHTS, Case, f32, lora, read_safetensors, write_safetensors

BLOCK = "transformer.transformer_blocks.0.attn1.to_q"


class Checkpoint(Case):
    def test_bundled_model(self):
        doc = self.ok("inspect", MODEL, "--json")
        header, _, data = read_safetensors(os.path.join(MODEL, WEIGHTS))
        self.assertEqual((doc["kind"], doc["format"], doc["layout"]), ("checkpoint", "safetensors", "directory"))
        self.assertEqual(doc["n_tensors"], len(header))
        self.assertEqual(doc["n_bytes"], sum(map(len, data.values())))
        self.assertEqual([c["name"] for c in doc["components"]], ["transformer"])
        self.assertEqual(doc["components"][0]["class_name"], "DiTTransformer2DModel")
        blocks = [layer["name"] for layer in doc["layers"] if not layer["is_stem"]]
        self.assertEqual(sorted(blocks), [f"transformer_blocks.{i}" for i in range(8)])
        self.assertEqual(sum(layer["n_tensors"] for layer in doc["layers"]), doc["n_tensors"])
        self.assertEqual(sum(layer["n_bytes"] for layer in doc["layers"]), doc["n_bytes"])
        self.assertEqual({k: v["n_tensors"] for k, v in doc["dtypes"].items()}, {"BF16": len(header)})
        self.assertEqual(doc["odd"], [])
        self.assertRegex(doc["content_id"], "^[0-9a-f]{32}$")
        self.assertNotIn("tensors", doc)

    def test_text(self):
        result = self.ok("inspect", MODEL)
        self.assertEqual(result.err, "")
        self.assertRegex(result.out, r"(?m)^format +safetensors, directory: 5\.\d MB in \d+ tensors, 9 layers, 1 file$")
        self.assertRegex(result.out, r"(?m)^  transformer: transformer_blocks\.0 to 7 +8 +\d+ +\d+\.\d kB$")
        self.assertRegex(result.out, r"(?m)^odd +nothing$")

    def test_long_lists_tensors(self):
        header, _, _ = read_safetensors(os.path.join(MODEL, WEIGHTS))
        doc = self.ok("inspect", "--long", MODEL, "--json")
        self.assertEqual({t["name"]: (t["dtype"], t["shape"]) for t in doc["tensors"]},
                         {name: (t["dtype"], t["shape"]) for name, t in header.items()})
        text = self.ok("inspect", "-L", MODEL).out
        for name in header:
            self.assertIn(name, text)

    def test_content_id_is_of_the_content(self):
        copy = self.path("copy")
        shutil.copytree(MODEL, copy)
        self.assertEqual(self.ok("inspect", copy, "--json")["content_id"], self.ok("inspect", MODEL, "--json")["content_id"])
        weights = os.path.join(copy, WEIGHTS)
        with open(weights, "r+b") as file:
            file.seek(-1, os.SEEK_END)
            last = file.read(1)
            file.seek(-1, os.SEEK_END)
            file.write(bytes([last[0] ^ 1]))
        self.assertNotEqual(self.ok("inspect", copy, "--json")["content_id"], self.ok("inspect", MODEL, "--json")["content_id"])

    def test_odd(self):
        path = write_safetensors(self.path("m.safetensors"), {
            "blocks.0.attn.w": ("F32", [2, 2], f32([1] * 4)), "blocks.1.attn.w": ("F32", [2, 2], f32([1] * 4)),
            "blocks.3.attn.w": ("F32", [2, 2], f32([1] * 4)), "blocks.4.attn.w": ("F32", [1, 2], f32([1] * 2)),
            "blocks.4.attn.b": ("F32", [2], f32([1] * 2)), "codes": ("U8", [3], b"abc"),
            "codes2": ("U8", [2], b"de"), "nothing": ("F32", [0], b""), "late": ("F32", [1], f32([1])), "z": ("U8", [1], b"d")})
        odd = "\n".join(self.ok("inspect", path, "--json")["odd"])
        self.assertIn("'codes' (U8) and 2 more", odd)
        self.assertIn("empty: 'nothing'", odd)
        self.assertIn("layer 'blocks.1' is followed by 'blocks.3'", odd)
        self.assertIn("layer 'blocks.3' has 1 tensors and layer 'blocks.4' has 2", odd)
        self.assertIn("item size: 'late'", odd)
        self.assertIn("layer 'blocks.1' is followed by 'blocks.3'", self.ok("inspect", path).out)

    def test_errors(self):
        self.assertEqual(self.fails(1, "'nowhere'", "inspect", "nowhere")["code"], "notfound")
        self.fails(1, "'./nowhere'", "inspect", "./nowhere")
        with open(self.path("x.ckpt"), "wb") as file:
            file.write(b"PK")
        self.fails(1, "x.ckpt", "inspect", self.path("x.ckpt"))
        with open(self.path("x.safetensors"), "wb") as file:
            file.write(b"12345678{}")
        self.assertEqual(self.fails(1, "x.safetensors", "inspect", self.path("x.safetensors"))["code"], "format")
        self.assertEqual(self.fails(2, "'--model' goes with an adapter", "inspect", MODEL, "--model", MODEL)["code"], "usage")


class Adapter(Case):
    def test_bundled_adapters(self):
        doc = self.ok("inspect", "turbo", "--json")
        self.assertEqual((doc["kind"], doc["family"], doc["dialect"]), ("adapter", "lora", "kohya"))
        self.assertEqual(doc["rank"], {"min": 32, "max": 32})
        self.assertEqual(doc["scale"], {"min": 0.5, "max": 0.5})
        self.assertEqual(doc["dtypes"], "F16")
        self.assertEqual(len(doc["targets"]), len(set(doc["targets"])))
        self.assertIn("lora_unet_transformer_blocks_0_attn1_to_q", doc["targets"])
        self.assertRegex(doc["digest"], "^[0-9a-f]{32}$")
        doc = self.ok("inspect", "noto", "--json")
        self.assertEqual((doc["family"], doc["dialect"], doc["rank"]["min"], doc["scale"]["max"]), ("lora", "diffusers", 16, 1))
        doc = self.ok("inspect", "night", "--json")
        self.assertEqual((doc["family"], doc["dialect"], doc["scale"]["min"]), ("lokr", "peft", 0.5))

    def test_text(self):
        text = self.ok("inspect", "turbo").out
        self.assertRegex(text, r"(?m)^family +lora$")
        self.assertRegex(text, r"(?m)^  lora_unet_transformer_blocks_\*_attn\d_to_q +lora +8 +32 +0\.5$")

    def test_ranks_scales_metadata(self):
        path = write_safetensors(self.path("a.safetensors"), {
            **lora(BLOCK, 128, 128, rank=2, alpha=1), **lora(BLOCK.replace("0", "1"), 128, 128, rank=8, alpha=16)},
            {"modelspec.trigger_phrase": "ohwx cat", "ss_tag_frequency": json.dumps({"set": {"tree": 3, "ohwx": 40, "sky": 7}}),
             "ss_network_dim": "8", "evil": "a\u001b[31mb\nc"})
        doc = self.ok("inspect", path, "--json")
        self.assertEqual(doc["rank"], {"min": 2, "max": 8})
        self.assertEqual(doc["scale"], {"min": 0.5, "max": 2})
        self.assertEqual(doc["trigger_words"], ["ohwx cat"])
        self.assertEqual(doc["tags"], ["ohwx", "sky", "tree"])
        self.assertEqual(doc["metadata"]["ss_network_dim"], "8")
        self.assertEqual(doc["metadata"]["evil"], "a\u001b[31mb\nc")
        text = self.ok("inspect", path).out
        self.assertRegex(text, r"(?m)^trigger +ohwx cat$")
        self.assertIn("evil = a?[31mb?c", text)
        self.assertNotIn("\x1b", text)

    def test_content_decides_not_the_name(self):
        path = write_safetensors(self.path("model.bin.safetensors"), lora(BLOCK, 128, 128))
        self.assertEqual(self.ok("inspect", path, "--json")["kind"], "adapter")
        shutil.copy(os.path.join(MODEL, WEIGHTS), self.path("lora.safetensors"))
        self.assertEqual(self.ok("inspect", self.path("lora.safetensors"), "--json")["kind"], "checkpoint")

    def test_a_refused_adapter_is_no_checkpoint(self):
        path = write_safetensors(self.path("dora.safetensors"), {
            **lora(BLOCK, 128, 128), BLOCK + ".dora_scale": ("F32", [128, 1], f32([1] * 128))})
        self.assertIn("dora", self.fails(1, "dora", "inspect", path)["message"].lower())
        for key, why in (("double_blocks.0.processor.qkv_lora1.down.weight", "XLabs"), ("x.hada_t1", "Tucker"), ("x.ia3_l", "IA3"),
                         ("x.lora_mid.weight", "Tucker"), ("x.reshape_weight", "reshape_weight"), ("x.lora_E", "AdaLoRA"),
                         ("x.modules_to_save.default.weight", "modules_to_save"), ("lora_controlnet", "control LoRA")):
            write_safetensors(path, {key: ("F32", [2, 2], f32([1] * 4))})
            self.assertIn(key, self.fails(1, why, "inspect", path)["message"])

    def test_differences_alone_are_an_adapter(self):
        for key in ("x.diff", "x.diff_b", "blocks.0.diff_m", "norm.w_norm", "norm.b_norm"):
            path = write_safetensors(self.path("diff.safetensors"), {key: ("F32", [4], f32([1] * 4))})
            doc = self.ok("inspect", path, "--json")
            self.assertEqual((doc["kind"], doc["family"]), ("adapter", "diff"), key)

    def test_a_ref_to_a_snapshot_that_is_not_there_is_said(self):
        snapshot = self.path("models--org--name", "snapshots", "aaaa")
        os.makedirs(snapshot)
        os.mkdir(self.path("models--org--name", "refs"))
        shutil.copy(os.path.join(MODEL, WEIGHTS), os.path.join(snapshot, "model.safetensors"))
        with open(self.path("models--org--name", "refs", "main"), "w", encoding="utf-8") as file:
            file.write("bbbb")
        result = self.ok("inspect", "org/name", env={"HF_HUB_CACHE": self.dir})
        self.assertRegex(result.err, r"warning: .*refs/main means snapshot 'bbbb', which is not there: the newest, 'aaaa', is used")

    def test_with_model(self):
        doc = self.ok("inspect", "noto", "--model", MODEL, "--json")
        self.assertEqual(doc["kind"], "adapter")
        self.assertGreater(doc["keys_matched"], 0)
        self.assertEqual(doc["keys_unmatched"], [])
        self.assertTrue(0 < doc["survival"] <= 1.01)
        plan = self.ok("plan", "--lora", "noto", "--json")
        for field in ("keys_matched", "tensors_changed", "bytes_changed", "survival", "composition"):
            self.assertEqual(doc[field], plan[field])
        text = self.ok("inspect", "noto", "--model", MODEL).out
        self.assertRegex(text, r"(?m)^survival ")

    def test_path_with_suffixes_is_a_path_here(self):
        path = write_safetensors(self.path("a,alpha=3:2"), lora(BLOCK, 128, 128))
        self.assertGreater(self.ok("inspect", path, "--model", MODEL, "--json")["keys_matched"], 0)


if __name__ == "__main__":
    unittest.main()
