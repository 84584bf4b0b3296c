"""merge --part auto: the share comes from the launcher. With a real mpirun where there is one; Slurm and indexed jobs by their variables."""
import json
import os
import shutil
import signal
import subprocess
import unittest

from cli import MODEL, PAGEFLIP, Case, lora, pageflip, read, write_safetensors

LAUNCHERS = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE", "PMIX_RANK", "SLURM_PROCID", "SLURM_NTASKS",
             "SLURM_NPROCS", "JOB_COMPLETION_INDEX", "PAGEFLIP_PARTS")
MPIRUN = shutil.which("mpirun")
MPI = ["--allow-run-as-root", "--oversubscribe"]
N = 4


def clean_environment(**more):
    return {**{k: v for k, v in os.environ.items() if k not in LAUNCHERS}, **more}


class Parts(Case):
    def setUp(self):
        super().setUp()
        for name in LAUNCHERS:
            os.environ.pop(name, None)
        n, n_blocks = 512, 32  # 16 MiB in items of 512 KiB, journalled every MiB
        self.model, self.lora = self.path("m.safetensors"), self.path("l.safetensors")
        write_safetensors(self.model, {f"blocks.{i}.w.weight": ("BF16", [n, n], bytes((j * 7 + i) % 64 for j in range(512)) * n * 2)
                                       for i in range(n_blocks)})
        tensors = {}
        for i in range(n_blocks):
            tensors.update(lora(f"blocks.{i}.w", n, n, 4, scale=1))
        write_safetensors(self.lora, tensors)
        self.whole = self.path("whole.safetensors")
        self.args = ["merge", "--model", self.model, "--lora", self.lora, "--threads", "1", "--json"]
        self.n_bytes = self.ok(*self.args, "-o", self.whole)["bytes_written"]
        self.out = self.path("out.safetensors")

    def part(self, status=0, out=None, **env):
        result = pageflip(*self.args, "--part", "auto", "-o", out or self.out, env=env)
        self.assertEqual(result.status, status, result.err)
        return result.json

    def check(self):
        self.assertEqual(read(self.out), read(self.whole))
        self.assertFalse(os.path.exists(self.out + ".partial"))


class Environments(Parts):
    def test_slurm(self):
        docs = [self.part(SLURM_PROCID=str(i), SLURM_NTASKS="3", SLURM_JOB_ID="1") for i in (2, 0, 1)]
        self.assertEqual([(d["part"], d["parts"], d["complete"]) for d in docs], [(3, 3, False), (1, 3, False), (2, 3, True)])
        self.assertEqual(sum(d["bytes_written"] for d in docs), self.n_bytes)
        self.check()

    def test_kubernetes(self):
        for i in range(2):
            doc = self.part(JOB_COMPLETION_INDEX=str(i), PAGEFLIP_PARTS="2")
        self.assertTrue(doc["complete"])
        self.check()
        error = self.part(1, JOB_COMPLETION_INDEX="0")["error"]
        self.assertIn("set PAGEFLIP_PARTS to their number (the job's completions)", error["message"])

    def test_a_pod_that_starts_again_after_all_was_published(self):
        """It proves its share and is content; a share that is another one is refused as before."""
        for i in range(2):
            self.part(SLURM_PROCID=str(i), SLURM_NTASKS="2")
        for force in ([], ["--force"]):
            stamp = os.stat(self.out)
            self.args += force
            doc = self.part(SLURM_PROCID="0", SLURM_NTASKS="2")
            self.assertEqual((doc["complete"], doc["bytes_written"]), (True, 0))
            self.assertEqual((os.stat(self.out).st_ino, os.stat(self.out).st_mtime_ns), (stamp.st_ino, stamp.st_mtime_ns))
        self.args.remove("--force")
        data = bytearray(read(self.out))
        data[-1] ^= 1  # of the last tensor: every second one is part 2's to prove
        with open(self.out, "wb") as file:
            file.write(data)
        self.assertEqual(self.part(1, SLURM_PROCID="1", SLURM_NTASKS="2")["error"]["code"], "exists")
        self.assertTrue(self.part(SLURM_PROCID="0", SLURM_NTASKS="2")["complete"])
        self.assertEqual(self.part(1, SLURM_PROCID="0", SLURM_NTASKS="1")["error"]["code"], "exists")
        shutil.copy(self.model, self.out)
        self.assertEqual(self.part(1, SLURM_PROCID="0", SLURM_NTASKS="2")["error"]["code"], "exists")

    def test_a_model_directory_that_was_published(self):
        out = self.path("dir")
        self.args = ["merge", "--model", MODEL, "--lora", "noto", "--merge-dtype", "f32", "--json"]
        for i in (0, 1, 0):
            doc = self.part(out=out, SLURM_PROCID=str(i), SLURM_NTASKS="2")
        self.assertEqual((doc["complete"], doc["bytes_written"]), (True, 0))

    def test_errors(self):
        for code, text, env in (
                ("notfound", "no launcher has started this process", {}),
                ("conflict", "SLURM_PROCID of Slurm is 4, and there are 4 parts", {"SLURM_PROCID": "4", "SLURM_NTASKS": "4"}),
                ("invalid", "OMPI_COMM_WORLD_RANK is set and OMPI_COMM_WORLD_SIZE is not", {"OMPI_COMM_WORLD_RANK": "0"}),
                ("invalid", "SLURM_PROCID is 'x'", {"SLURM_PROCID": "x", "SLURM_NTASKS": "4"})):
            error = self.part(1, **env)["error"]
            self.assertEqual(error["code"], code)
            self.assertIn(text, error["message"])
        self.assertFalse(os.path.exists(self.out + ".partial"))


class Mpi(Parts):
    def setUp(self):
        if not MPIRUN:
            self.skipTest("mpirun is not installed: merge --part auto is not tried under it")
        super().setUp()

    def mpirun(self, *apps):
        """apps: (count, options, shell text before the program). Each rank's JSON goes to a file of its own: the documents by rank."""
        command = [MPIRUN, *MPI]
        program = " ".join(f"'{word}'" for word in (PAGEFLIP, *self.args, "--part", "auto", "-o", self.out))
        for i, (count, options, before) in enumerate(apps):
            command += [":"] * bool(i) + ["-n", str(count), *options, "sh", "-c", f"{before} exec {program} >'{self.dir}/rank'$OMPI_COMM_WORLD_RANK"]
        for i in range(N):
            if os.path.exists(self.path(f"rank{i}")):
                os.unlink(self.path(f"rank{i}"))
        run = subprocess.Popen(command, cwd=self.dir, env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                               start_new_session=True)
        try:
            said, _ = run.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, signal.SIGKILL)
            raise
        docs = []
        for i in range(N):
            text = read(self.path(f"rank{i}")).decode() if os.path.exists(self.path(f"rank{i}")) else ""
            docs.append(json.loads(text) if text else None)
        return run.returncode, docs, said

    def test_four_ranks(self):
        status, docs, said = self.mpirun((N, [], ""))
        self.assertEqual(status, 0, said)
        self.assertEqual([(d["part"], d["parts"]) for d in docs], [(i + 1, N) for i in range(N)])
        self.assertEqual(sum(d["bytes_written"] for d in docs), self.n_bytes)
        self.check()

    def test_one_rank_is_killed_and_the_same_command_writes_what_is_missing(self):
        # The last rank begins when the others are done, and is killed in the middle of its share.
        wait = "while [ $(cat rank0 rank1 rank2 2>/dev/null | grep -c complete) -lt 3 ]; do sleep 0.02; done;"
        status, docs, said = self.mpirun((N - 1, [], ""), (1, ["-x", "PF_FAULT=kill@12"], wait))
        self.assertNotEqual(status, 0, said)
        self.assertIsNone(docs[N - 1])
        written = [d["bytes_written"] for d in docs[:N - 1]]
        self.assertGreater(min(written), 0)
        self.assertFalse(os.path.exists(self.out))
        status, docs, said = self.mpirun((N, [], ""))
        self.assertEqual(status, 0, said)
        self.assertEqual([d["bytes_written"] for d in docs[:N - 1]], [0] * (N - 1))
        self.assertTrue(docs[N - 1]["resumed"])
        missing = docs[N - 1]["bytes_written"]
        self.assertGreater(missing, 0)
        self.assertLess(missing, self.n_bytes - sum(written), "what the killed rank had made durable was written again")
        self.check()
        status, docs, said = self.mpirun((N, [], ""))
        self.assertEqual((status, [d["bytes_written"] for d in docs]), (0, [0] * N), said)
        self.check()


if __name__ == "__main__":
    unittest.main()
