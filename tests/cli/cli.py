"""What the tests of the command share: running it, a temp dir per test, and small safetensors files written by hand.

The program is $PAGEFLIP, the source tree $PF_SOURCE. Standard library only. Each test_*.py is one ctest."""
import contextlib
import json
import os
import pty
import shutil
import struct
import subprocess
import tempfile
import unittest

PAGEFLIP = os.environ["PAGEFLIP"]
SOURCE = os.environ["PF_SOURCE"]
if "TMPDIR" not in os.environ:
    with open("/proc/self/mounts", encoding="utf-8") as mounts:
        if any(line.split()[1:3] == ["/tmp", "tmpfs"] for line in mounts):
            os.environ["TMPDIR"] = "/var/tmp"  # files in memory: mapped, they count as anonymous, and nothing drops them
MODEL = os.path.join(SOURCE, "data", "emoji-dit")
WEIGHTS = os.path.join("transformer", "diffusion_pytorch_model.safetensors")


class Result:
    def __init__(self, done):
        self.status, self.out = done.returncode, done.stdout.decode()
        self.err = done.stderr.decode()

    @property
    def json(self):
        return json.loads(self.out)


def pageflip(*args, cwd=None, env=None, stdout=subprocess.PIPE):
    done = subprocess.run([PAGEFLIP, *map(str, args)], stdout=stdout, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, cwd=cwd,
                          env={**os.environ, **(env or {})}, timeout=1000, check=False)
    if done.stdout is None:
        done.stdout = b""
    return Result(done)


def draws(*args, **kwargs):
    """Starts a generation; returns when its bar on a terminal says that it draws: the process, and what reads the rest of its standard error."""
    ours, theirs = pty.openpty()
    run = subprocess.Popen([PAGEFLIP, "generate", *args], stdout=subprocess.PIPE, stderr=theirs, **kwargs)
    os.close(theirs)
    said = b""
    while b"drawing [" not in said:
        said += os.read(ours, 4096)

    def rest():
        text = b""
        with contextlib.suppress(OSError):  # the other end is closed
            while True:
                text += os.read(ours, 4096)
        os.close(ours)
        return text.decode()

    return run, rest


def read_safetensors(path):
    """(header without metadata, metadata, {name: bytes})"""
    data = read(path)
    n = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + n])
    metadata = header.pop("__metadata__", {})
    return header, metadata, {k: data[8 + n + v["data_offsets"][0]:8 + n + v["data_offsets"][1]] for k, v in header.items()}


def write_safetensors(path, tensors, metadata=None):
    """tensors: {name: (dtype, shape, bytes)}"""
    header, off = {}, 0
    if metadata:
        header["__metadata__"] = metadata
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [off, off + len(data)]}
        off += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"".join(t[2] for t in tensors.values()))
    return path


def f32(values):
    return struct.pack(f"<{len(values)}f", *values)


def ramp(n, scale):
    """n small numbers, different and of both signs."""
    return f32([scale * ((i * 37 % 101) - 50) / 50 for i in range(n)])


def read(path):
    with open(path, "rb") as file:
        return file.read()


def lora(module, n_out, n_in, rank=2, scale=0.01, alpha=1):
    """The tensors of one lora pair in diffusers' spelling; alpha None leaves it unsaid, which is worth a note."""
    tensors = {module + ".lora_A.weight": ("F32", [rank, n_in], ramp(rank * n_in, scale)),
               module + ".lora_B.weight": ("F32", [n_out, rank], ramp(n_out * rank, 1))}
    if alpha is not None:
        tensors[module + ".alpha"] = ("F32", [], f32([alpha]))
    return tensors


def say_skip(result, test, reason, add_skip=unittest.TextTestResult.addSkip):
    """Each skip is a line of its own, behind the dots that unittest writes, which ./test collects."""
    print(f"\nSKIP: {test.id().removeprefix('__main__.')}: {reason}", flush=True)
    add_skip(result, test, reason)


unittest.TextTestResult.addSkip = say_skip


class Case(unittest.TestCase):
    def setUp(self):
        self.dir = tempfile.mkdtemp(prefix="pf-cli-")
        self.addCleanup(shutil.rmtree, self.dir, ignore_errors=True)

    def path(self, *names):
        return os.path.join(self.dir, *names)

    def ok(self, *args, **kwargs):
        """Runs and expects success; with --json the document, else the result."""
        result = pageflip(*args, **kwargs)
        self.assertEqual(result.status, 0, result.err)
        return result.json if "--json" in args else result

    def fails(self, status, text, *args, **kwargs):
        """Runs and expects one sentence on stderr that has the text, and nothing on stdout; the same with --json."""
        result = pageflip(*args, **kwargs)
        self.assertEqual(result.status, status, f"{args}: {result.err}")
        self.assertIn(text, result.err)
        self.assertTrue(result.err.startswith("pageflip: "), result.err)
        self.assertEqual(result.err.count("\n"), 1, result.err)
        self.assertFalse(result.err.rstrip("\n").endswith("."), result.err)
        self.assertEqual(result.out, "")
        n_words = 2 if args[0] in ("bench", "cache") else 1
        both = pageflip(*args[:n_words], "--json", *args[n_words:], **kwargs)
        self.assertEqual(both.status, status, both.err)
        self.assertEqual(list(both.json), ["error"])
        self.assertEqual(sorted(both.json["error"]), ["code", "message"])
        self.assertIn(both.json["error"]["message"], both.err)
        return both.json["error"]
