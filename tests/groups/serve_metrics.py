"""What /metrics exports and what the dashboard asks for, by promtool ($PROMTOOL): tests/groups/metrics runs it."""
import json
import os
import re
import subprocess
import tempfile
import unittest

from cli import SOURCE
from serving import ServeCase

PROMTOOL = os.environ["PROMTOOL"]
DASHBOARD = os.path.join(SOURCE, "packaging", "grafana-dashboard.json")


def expressions():
    with open(DASHBOARD, encoding="utf-8") as file:
        doc = json.load(file)
    out = [(panel["title"], target["expr"]) for panel in doc["panels"] for target in panel.get("targets", [])]
    queries = [v["query"]["query"] for v in doc["templating"]["list"] if v["type"] == "query"]
    return out, [re.match(r"label_values\((\w+), \w+\)$", q).group(1) for q in queries]


class Metrics(ServeCase):
    def exported(self):
        """After a little of everything; {name as an expression spells it: type}."""
        self.server.draw()
        self.server.draw(prompt="zzz")
        self.server.get("/nowhere")
        self.ok("/v1/set_lora", {"lora_nickname": "n", "lora_path": "noto", "merge_mode": "merge"})
        self.server.draw()
        reply = self.server.get("/metrics")
        self.assertEqual(reply.status, 200)
        return reply.body

    def test_promtool_accepts_the_text(self):
        text = self.exported()
        out = subprocess.run([PROMTOOL, "check", "metrics"], input=text, capture_output=True, check=False)
        self.assertEqual((out.returncode, out.stdout, out.stderr), (0, b"", b""))  # lint is on stderr
        wrong = subprocess.run([PROMTOOL, "check", "metrics"], input=text + b"pageflip_x{ 1\n", capture_output=True, check=False)
        self.assertNotEqual(wrong.returncode, 0)

    def test_promtool_parses_every_expression(self):
        rows, _ = expressions()
        self.assertGreater(len(rows), 40)
        with tempfile.NamedTemporaryFile("w", suffix=".yml") as file:
            rules = [{"record": f"r:{i}", "expr": e.replace("$__rate_interval", "5m").replace("$instance", ".*")} for i, (_, e) in enumerate(rows)]
            json.dump({"groups": [{"name": "dashboard", "rules": rules}]}, file)  # JSON is YAML
            file.flush()
            out = subprocess.run([PROMTOOL, "check", "rules", file.name], capture_output=True, text=True, check=False)
        self.assertEqual(out.returncode, 0, out.stdout + out.stderr)
        self.assertIn(f"{len(rows)} rules found", out.stdout)

    def test_every_metric_and_label_is_exported(self):
        text = self.exported().decode()
        types = dict(re.findall(r"^# TYPE (\w+) (\w+)$", text, re.M))
        names = set(types) | {name + end for name, kind in types.items() if kind == "histogram" for end in ("_bucket", "_sum", "_count")}
        labels = {}
        for name, inside in re.findall(r"^(\w+)\{(.*)\} ", text, re.M):
            labels.setdefault(name, set()).update(re.findall(r'(\w+)="', inside))
        rows, variables = expressions()
        asked = set(variables)
        for title, e in rows:
            found = set(re.findall(r"\bpageflip_\w+", e))
            self.assertTrue(found, title)
            asked |= found
            by = {w for group in re.findall(r"by \(([^)]*)\)", e) for w in group.replace(" ", "").split(",")} | set(re.findall(r'[{,] *(\w+)=', e))
            self.assertLessEqual(by - {"instance"}, set().union(*(labels.get(name, set()) for name in found)), title)
            for name in found:  # a counter is looked at through rate or increase, a gauge is not
                is_counter = types.get(name) == "counter" or name.endswith("_bucket")
                self.assertEqual(is_counter, bool(re.search(r"(rate|increase)\(" + name + r"\b", e)), (title, name))
        self.assertEqual(asked - names, set())
        missing = {n for n in types if not any(a == n or a.startswith(n + "_") for a in asked)}
        self.assertEqual(missing, set(), "exported and on no panel")


if __name__ == "__main__":
    unittest.main()
