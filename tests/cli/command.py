"""The command from outside, for the tests of this folder: a place to run it in, and ranks as torchrun starts them, by
environment variables, without needing torchrun."""

import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import unittest

CONFIG = """
[model]
dim = 24
layers = 2
heads = 6
kv_heads = 2
feed_forward = 20
[data]
path = "text.txt"
[train]
steps = 3
batch = 4
sequence = 16
param_dtype = "fp32"
[eval]
sequences = 4
sample_bytes = 8
[run]
device = "cpu"
"""

RANK_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT",
)


def clean_environment(**extra):
    env = {k: v for k, v in os.environ.items() if k not in RANK_VARIABLES}
    return {**env, "OMP_NUM_THREADS": "1", **extra}


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def rank_environments(ranks):
    """One for each rank; those of one rank say so too."""
    port = str(free_port())
    return [
        clean_environment(
            RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        for rank in range(ranks)
    ]


class CommandTest(unittest.TestCase):
    """Each test has a folder of its own."""

    binary = ""  # main() sets it

    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.dir = pathlib.Path(temporary.name)

    def ragged(self, *args, **env):
        """The result of one process that is no rank."""
        return subprocess.run(
            [self.binary, *map(str, args)], cwd=self.dir, env=clean_environment(**env), capture_output=True, text=True,
            timeout=120)

    def start_ranks(self, ranks, *args):
        """Processes by rank, ended with the test."""
        processes = [
            subprocess.Popen(
                [self.binary, *map(str, args)], cwd=self.dir, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                text=True)
            for env in rank_environments(ranks)
        ]
        self.addCleanup(self.end, processes)
        return processes

    @staticmethod
    def end(processes):
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.communicate()

    def outputs_of(self, processes):
        """What each printed; all must succeed."""
        outputs = []
        for process in processes:
            out, err = process.communicate(timeout=120)
            self.assertEqual(process.returncode, 0, err)
            outputs.append(out)
        return outputs


class TrainingTest(CommandTest):
    """There is a text in the folder, and tiny.toml, a configuration that trains on it."""

    def setUp(self):
        super().setUp()
        (self.dir / "text.txt").write_text("".join(f"x{i} = {i * i % 101}\n" for i in range(500)))
        (self.dir / "tiny.toml").write_text(CONFIG)


def main():
    CommandTest.binary = str(pathlib.Path(sys.argv.pop(1)).resolve())
    unittest.main(module="__main__", verbosity=2)
