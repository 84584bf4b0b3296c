"""`pageflip serve` under the restrictions of its systemd unit, made by bwrap: tests/groups/packaging runs it.

Each line of the unit's [Service] section is looked up in PARTS; one that is not there fails, so that the two cannot drift apart. What is
seen from inside (the layer map) is compared with what the kernel says outside, where the test may see it."""
import ctypes
import glob
import http.client
import json
import mmap
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import unittest

from cli import PAGEFLIP, SOURCE
from serving import Server, png

NOBODY = 65534
UNIT = os.path.join(SOURCE, "packaging", "pageflip.service.in")
HEADERS = ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm/unistd_64.h")
IS_ROOT = os.geteuid() == 0
BECOME = ["setpriv", "--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups"] if IS_ROOT else []

# directive -> words for bwrap, a name of a part of the system call filter, or why it is not tried here
ENTRY = "handled by start()"
KERNEL = "made by the manager outside of the process"
PARTS = {
    "Type": ENTRY, "ExecStart": ENTRY, "EnvironmentFile": ENTRY, "Restart": KERNEL, "TimeoutStopSec": KERNEL, "LimitNOFILE": ENTRY, "LimitCORE": ENTRY,
    "DynamicUser": ENTRY, "CacheDirectory": ENTRY, "CacheDirectoryMode": ENTRY, "UMask": ENTRY, "NoNewPrivileges": [], "CapabilityBoundingSet": ["--cap-drop", "ALL"],
    "AmbientCapabilities": [], "ProtectSystem": [], "ProtectHome": ["--tmpfs", "/home", "--tmpfs", "/root"], "PrivateTmp": ["--tmpfs", "/tmp", "--tmpfs", "/var/tmp"],
    "PrivateDevices": ["--dev", "/dev"], "PrivateUsers": ["--unshare-user"], "PrivateIPC": ["--unshare-ipc"], "ProtectHostname": ["--unshare-uts"],
    "ProtectClock": [], "ProtectKernelTunables": [], "ProtectKernelModules": [], "ProtectKernelLogs": [], "ProtectControlGroups": [], "ProtectProc": KERNEL,
    "RestrictNamespaces": "namespaces", "RestrictRealtime": KERNEL, "RestrictSUIDSGID": KERNEL, "RestrictAddressFamilies": "families", "IPAddressDeny": KERNEL,
    "IPAddressAllow": KERNEL, "LockPersonality": KERNEL, "MemoryDenyWriteExecute": "exec", "RemoveIPC": KERNEL, "KeyringMode": KERNEL,
    "SystemCallArchitectures": "calls", "SystemCallFilter": "calls", "SystemCallErrorNumber": "calls",
}


def directives():
    section, out = None, []
    with open(UNIT, encoding="utf-8") as file:
        lines = file.read().splitlines()
    for line in lines:
        if line.startswith("["):
            section = line
        elif line and not line.startswith("#") and section == "[Service]":
            out.append(tuple(line.split("=", 1)))
    return out


class Filter:
    """A classic BPF program with the allow-list of the unit, its errors EPERM; x86-64 numbers."""
    ALLOW, DENY = (6, 0, 0, 0x7FFF0000), (6, 0, 0, 0x00050000 | 1)

    def __init__(self, lines):
        self.numbers = {}
        for path in HEADERS:
            if os.path.exists(path):
                with open(path, encoding="utf-8") as file:
                    self.numbers = {n: int(v) for n, v in re.findall(r"#define __NR_(\w+) (\d+)", file.read())}
        self.groups = {}
        name = None
        for line in subprocess.run(["systemd-analyze", "syscall-filter", "--no-pager"], capture_output=True, text=True, check=True).stdout.splitlines():
            if line.startswith("@"):
                name = line.split()[0]
                self.groups[name] = []
            elif line.strip() and not line.strip().startswith("#") and name:
                self.groups[name].append(line.strip())
        self.allowed = set()
        for words in lines:
            deny = words.startswith("~")
            for word in words.lstrip("~").split():
                self.allowed = self.allowed - self.expand(word) if deny else self.allowed | self.expand(word)
        self.allowed |= self.expand("@default")

    def expand(self, word):
        if not word.startswith("@"):
            return {word}
        return set().union(*map(self.expand, self.groups[word]))

    def program(self):
        n, out = self.numbers, []

        def add(code, jt, jf, k):
            out.append((code, jt, jf, k))

        def arg(i):
            add(0x20, 0, 0, 16 + 8 * i)

        add(0x20, 0, 0, 4)  # the architecture
        add(0x15, 1, 0, 0xC000003E)
        out.append(self.DENY)
        for call, i_arg in (("mmap", 2), ("mprotect", 2), ("socket", 0)):
            add(0x20, 0, 0, 0)
            checks = {"mmap": [(0x54, 0, 0, 6), (0x15, 0, 1, 6), self.DENY], "mprotect": [(0x54, 0, 0, 4), (0x15, 0, 1, 4), self.DENY],
                      "socket": [(0x15, 3, 0, 1), (0x15, 2, 0, 2), (0x15, 1, 0, 10), self.DENY]}[call]
            add(0x15, 0, len(checks) + 1, n[call])
            arg(i_arg)
            out.extend(checks)
        add(0x20, 0, 0, 0)
        for call in sorted(self.allowed - {"unshare", "setns"}):
            if call in n:
                add(0x15, 0, 1, n[call])
                out.append(self.ALLOW)
        out.append(self.DENY)
        return b"".join(struct.pack("<HBBI", *one) for one in out)


def cached_pages(path):
    """A list of 0 and 1, a page each; the test is the owner of the file, or root."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    with open(path, "rb") as file:
        n = os.fstat(file.fileno()).st_size
        at = libc.mmap(None, n, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
        out = ctypes.create_string_buffer((n + mmap.PAGESIZE - 1) // mmap.PAGESIZE)
        assert libc.mincore(at, n, out) == 0
        libc.munmap(at, n)
    return [b & 1 for b in out.raw]


def forget(path):
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Sandbox(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.dir = tempfile.mkdtemp(prefix="pf-sandbox-", dir="/var/tmp")  # not on a tmpfs: pages have to be dropped
        cls.addClassCleanup(shutil.rmtree, cls.dir, ignore_errors=True)
        os.chmod(cls.dir, 0o755)
        os.mkdir(os.path.join(cls.dir, "bin"))
        shutil.copy(PAGEFLIP, os.path.join(cls.dir, "bin", "pageflip"))
        shutil.copytree(os.path.join(SOURCE, "data"), os.path.join(cls.dir, "share", "pageflip"))
        cls.model = os.path.join(cls.dir, "model")
        subprocess.run([PAGEFLIP, "bench", "make", "--quiet", "--shape", "dit", "--scale", "0.03", cls.model], check=True, stdout=subprocess.DEVNULL)
        subprocess.run(["chmod", "-R", "a+rX", cls.dir], check=True)
        cls.weights = glob.glob(os.path.join(cls.model, "transformer", "*.safetensors"))

    def start(self, *args):
        inside, calls, names = [], [], set()
        for name, value in directives():
            self.assertIn(name, PARTS, "this line of the unit is not tried")
            part = PARTS[name]
            names.add(name)
            if isinstance(part, list):
                inside += part
            elif name == "SystemCallFilter":
                calls.append(value)
        self.assertEqual(set(PARTS), names)
        cache = tempfile.mkdtemp(dir=self.dir)
        if IS_ROOT:
            os.chown(cache, NOBODY, NOBODY)
        command = [*BECOME, "bwrap", "--ro-bind", "/", "/", *inside, "--ro-bind", self.dir, self.dir, "--bind", cache, cache, "--die-with-parent", "--new-session",
                    "--setenv", "CACHE_DIRECTORY", cache, "--unsetenv", "TMPDIR"]
        fds = []
        program = Filter(calls)
        if program.numbers and os.uname().machine == "x86_64":
            r, w = os.pipe()
            os.write(w, program.program())
            os.close(w)
            fds.append(r)
            command += ["--seccomp", str(r)]
        command += [os.path.join(self.dir, "bin", "pageflip"), "serve", "--cache-dir", cache, "--json", "--port", "0", "--log", "none", *args]
        self.log = tempfile.TemporaryFile()  # pylint: disable=consider-using-with
        self.addCleanup(self.log.close)
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.log, pass_fds=fds, umask=0o077)
        for fd in fds:
            os.close(fd)
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.wait, 60)
        self.addCleanup(process.kill)
        line = process.stdout.readline()
        if not line:
            self.log.seek(0)
            self.fail(self.log.read().decode())
        self.said = json.loads(line)
        return process

    def ask(self, method, path, body=None):
        c = http.client.HTTPConnection("127.0.0.1", self.said["port"], timeout=120)
        c.request(method, path, json.dumps(body) if body is not None else None, {"Content-Type": "application/json"} if body is not None else {})
        reply = c.getresponse()
        text = reply.read()
        c.close()
        self.assertEqual(reply.status, 200, text)
        return json.loads(text)

    def own(self, uid):
        for root, _, files in os.walk(self.model):
            for name in files:
                os.chown(os.path.join(root, name), uid, -1)

    def fraction(self):
        pages = [p for w in self.weights for p in cached_pages(w)]
        return sum(pages) / len(pages)

    def told(self):
        """The layer map against what is seen from outside. Returns the set of states."""
        layers = self.ask("GET", "/v1/status")["layers"]
        states = {layer["cached"] for layer in layers}
        if states != {"unknown"}:
            inside = sum(layer["cached_fraction"] * layer["bytes"] for layer in layers) / sum(layer["bytes"] for layer in layers)
            self.assertAlmostEqual(inside, self.fraction(), delta=0.03)
        else:
            self.assertEqual({layer["cached_fraction"] for layer in layers}, {None})
        return states

    def drop_behind(self, states):
        for w in self.weights:
            forget(w)
        self.assertLess(self.fraction(), 0.01)
        process = self.start("--model", self.model, "--host-memory", "150M")
        with open(f"/proc/{self.said['pid']}/status", encoding="utf-8") as file:
            status = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
        self.assertEqual((status["CapEff"].strip("0"), status["CapBnd"].strip("0"), status["NoNewPrivs"]), ("", "", "1"))
        if os.uname().machine == "x86_64":
            self.assertEqual(status["Seccomp"], "2")
        self.assertLess(self.fraction(), 0.5)
        self.assertLessEqual(self.told(), states)
        kept = sum(layer["bytes"] for layer in self.ask("GET", "/v1/status")["layers"] if layer["residency"] == "kept")
        total = sum(os.path.getsize(w) for w in self.weights)
        self.assertLess(kept / total, 0.6)
        names = self.ask("GET", "/model_info")["classes"]
        self.ask("POST", "/v1/images/generations", {"prompt": names[0], "num_inference_steps": 2, "guidance_scale": 1})
        self.assertLess(self.fraction(), kept / total + 0.1)  # what is not kept went behind the reader
        self.assertGreater(self.fraction(), kept / total - 0.1)
        self.assertLessEqual(self.told(), states)
        os.kill(self.said["pid"], signal.SIGTERM)
        self.assertEqual(process.wait(60), 0)

    def test_weights_of_its_own(self):
        if IS_ROOT:
            self.own(NOBODY)
        self.drop_behind({"yes", "partly", "no"})

    @unittest.skipUnless(IS_ROOT, "files of somebody else are made by root")
    def test_weights_of_somebody_else(self):
        self.own(0)
        self.drop_behind({"unknown"})

    def test_draws_and_builds_as_elsewhere(self):
        process = self.start()
        self.assertEqual(self.ask("POST", "/v1/set_lora", {"lora_nickname": "n", "lora_path": "noto", "merge_mode": "merge"})["way"], "overlay")
        inside = self.ask("POST", "/v1/images/generations", {"prompt": "a cat", "num_inference_steps": 2, "seed": 3})
        layers = self.ask("GET", "/v1/status")["layers"]
        self.assertIn("overlay", {layer["place"] for layer in layers})
        process.send_signal(signal.SIGKILL)
        process.wait(60)
        server = Server("--lora", "n=noto")
        self.addCleanup(server.clean)
        outside = server.draw(quick=False, prompt="a cat", num_inference_steps=2, seed=3).json
        self.assertEqual(inside["composition"], outside["composition"])
        self.assertEqual(png(inside["data"][0]), png(outside["data"][0]))


if __name__ == "__main__":
    if subprocess.run([*BECOME, "bwrap", "--unshare-user", "--ro-bind", "/", "/", "true"], check=False, capture_output=True).returncode:
        print("SKIP: packaging: this machine gives users no namespaces")
        sys.exit(0)
    unittest.main()
