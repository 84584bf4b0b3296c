"""The guide: every block marked <!-- run --> is run by bash against a server on the bundled model, and every route has a curl line in one."""
import glob
import json
import os
import re
import shutil
import subprocess
import tempfile
import unittest

from cli import PAGEFLIP, SOURCE
from serving import Server

GUIDE = os.path.join(SOURCE, "docs", "guide")
BLOCK = re.compile(r"^<!-- run -->\n```sh\n(.*?)^```$", re.M | re.S)


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def pages():
    return {os.path.basename(p): read(p) for p in sorted(glob.glob(os.path.join(GUIDE, "*.md")))}


def runnable(text):
    return "".join(BLOCK.findall(text))


class Guide(unittest.TestCase):
    def test_every_block_runs(self):
        if not shutil.which("curl"):
            print("SKIP: guide: curl is not installed", flush=True)
            self.skipTest("no curl")
        for name, text in pages().items():
            self.assertEqual(text.count("<!-- run -->"), len(BLOCK.findall(text)), name)
            script = runnable(text)
            if not script:
                continue
            server = Server("--lora", "n=noto", tcp=True)
            self.addCleanup(server.clean)
            with tempfile.TemporaryDirectory(prefix="pf-guide-") as work:
                script = "set -euo pipefail\n" + script.replace("localhost:8000", f"localhost:{server.port}")
                env = {**os.environ, "PATH": os.path.dirname(PAGEFLIP) + ":" + os.environ["PATH"]}
                out = subprocess.run(["bash", "-c", script], cwd=work, env=env, capture_output=True, text=True, timeout=120, check=False)
                self.assertEqual(out.returncode, 0, name + "\n" + out.stdout + out.stderr)
                self.assertNotIn('{"error": {"message"', re.sub(r'\{"error": [^\n]*"cancelled"[^\n]*', "", out.stdout), name)
                for file in glob.glob(os.path.join(work, "*.png")):
                    with open(file, "rb") as png:
                        self.assertEqual(png.read(4), b"\x89PNG", file)
            log = server.log()
            self.assertNotRegex(log, r" 5\d\d [\d.]+ms")
            self.assertEqual(server.stop(), 0)

    def test_every_route_has_a_curl_line(self):
        document = json.loads(read(os.path.join(SOURCE, "src", "server", "openapi.json")))
        lines = runnable("\n".join(pages().values())).replace("\\\n", " ").splitlines()
        for path, methods in document["paths"].items():
            pattern = re.compile(r"localhost:8000" + re.sub(r"\\\{\w+\\\}", r"[^/\\s]+", re.escape(path)) + r"(?=[\s\"']|$)")
            for method in methods:
                found = [line for line in lines if "curl" in line and pattern.search(line) or pattern.search(line) and line.startswith("    ")]
                if method == "post":
                    found = [line for line in found if "--json" in line or line.startswith("    ")]
                elif method == "delete":
                    found = [line for line in found if "-X DELETE" in line]
                self.assertTrue(found, f"{method} {path} is in no line that runs")

    def test_links_lead_somewhere(self):
        for name, text in pages().items():
            for target in re.findall(r"\]\(([^)#:]+)\)", text):
                self.assertTrue(os.path.exists(os.path.join(GUIDE, target)), (name, target))


if __name__ == "__main__":
    unittest.main()
