"""Runs tools/setup.sh and tools/venv_path.sh with stand-ins for dpkg-query, apt-get and the environment.

Nothing is installed: the stand-in for apt-get writes down how it was called.
"""

import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

REPO = pathlib.Path(__file__).resolve().parents[2]
PINNED = "2.15.0"


class SetupTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.folder.chmod(0o755)
        (self.folder / "bin").mkdir()
        self.apt_calls = self.folder / "apt_calls"
        self.write_script("apt-get", f'echo "$@" >> {self.apt_calls}')
        self.write_script("sudo", "exit 1")
        self.write_script("cmake", "echo cmake version 3.30.1")
        self.missing("none")
        self.env = {**os.environ, "PATH": f"{self.folder}/bin:{os.environ['PATH']}",
                    "XDG_CACHE_HOME": str(self.folder / "cache")}
        for name in ("VENV", "RAGGED_TORCH"):
            self.env.pop(name, None)

    def write_script(self, name, text):
        path = self.folder / "bin" / name
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)

    def missing(self, package):
        """Makes all packages look installed, except this one."""
        self.write_script("dpkg-query", f"""
for package in "${{@:3}}"; do
  if [[ $package != {package} ]]; then echo "installed $package"; fi
done""")

    def environment(self, torch):
        """A folder that looks like a Python environment with this version of torch."""
        venv = self.folder / "venv"
        (venv / "bin").mkdir(parents=True, exist_ok=True)
        package = venv / "site" / "torch"
        if torch:
            package.mkdir(parents=True, exist_ok=True)
            (package / "__init__.py").write_text("raise Exception('setup must not import torch')\n")
            (package / "version.py").write_text(f"__version__ = '{torch}'\n")
        python = venv / "bin" / "python"
        python.write_text(f'#!/bin/bash\nPYTHONPATH={venv}/site exec {sys.executable} -S "$@"\n')
        python.chmod(0o755)
        return str(venv)

    def run_script(self, script, *args, as_nobody=False, **env):
        command = [str(REPO / "tools" / script), *args]
        if as_nobody:
            command = ["setpriv", "--reuid=65534", "--clear-groups", *command]
        return subprocess.run(command, env={**self.env, **env}, capture_output=True, text=True,
                              stdin=subprocess.DEVNULL)

    def test_nothing_missing_touches_nothing(self):
        run = self.run_script("setup.sh", VENV=self.environment(PINNED))
        self.assertEqual((run.returncode, run.stderr), (0, ""))
        self.assertFalse(self.apt_calls.exists())
        self.assertFalse((self.folder / "cache").exists())

    @unittest.skipIf(os.geteuid() != 0, "only root installs without sudo")
    def test_missing_package_is_installed_and_said(self):
        self.missing("ccache")
        run = self.run_script("setup.sh", VENV=self.environment(PINNED))
        self.assertEqual(run.returncode, 0, run.stderr)
        self.assertIn("installing missing packages: ccache", run.stdout)
        update, install = self.apt_calls.read_text().splitlines()
        self.assertTrue(update.endswith("update"), update)
        self.assertTrue(install.endswith("install -y --no-install-recommends ccache"), install)

    @unittest.skipIf(os.geteuid() != 0, "needs to become another user")
    def test_neither_root_nor_sudo_names_the_command(self):
        self.missing("ccache")
        probe = self.run_script("venv_path.sh", as_nobody=True, VENV="/x")
        if probe.returncode != 0:
            self.skipTest("another user can't read this checkout")
        run = self.run_script("setup.sh", as_nobody=True, VENV=self.environment(PINNED))
        self.assertEqual(run.returncode, 1)
        self.assertIn("apt-get update && apt-get install -y --no-install-recommends ccache\n", run.stderr)
        self.assertFalse(self.apt_calls.exists())

    def test_old_cmake(self):
        self.write_script("cmake", "echo cmake version 3.22.1")
        run = self.run_script("setup.sh", VENV=self.environment(PINNED))
        self.assertEqual(run.returncode, 1)
        self.assertIn("Expected CMake 3.25 or newer, but got 3.22.1", run.stderr)

    def test_own_environment(self):
        for torch, code, message in ((None, 1, "has no torch"), (PINNED, 0, ""), (PINNED + "+cpu", 0, ""),
                                     ("2.11.0", 1, "but it has 2.11.0"), ("2.15.01", 1, "but it has 2.15.01")):
            with self.subTest(torch=torch):
                run = self.run_script("setup.sh", VENV=self.environment(torch))
                self.assertEqual(run.returncode, code, run.stderr)
                self.assertIn(message, run.stderr)
        run = self.run_script("setup.sh", VENV="/nowhere")
        self.assertEqual(run.returncode, 1)
        self.assertIn("Expected VENV=/nowhere to be a Python environment", run.stderr)

    def test_own_environment_with_another_torch_on_request(self):
        for torch, code in (("2.11.0", 0), ("2.14.2", 0), ("2.10.0", 1), ("2.16.0", 1), ("3.0.0", 1)):
            with self.subTest(torch=torch):
                run = self.run_script("setup.sh", VENV=self.environment(torch), RAGGED_TORCH="any")
                self.assertEqual(run.returncode, code, run.stderr)

    def test_path_of_the_environment(self):
        first = self.run_script("venv_path.sh").stdout
        self.assertRegex(first, rf"^{self.folder}/cache/ragged_fsdp/venv-[0-9a-f]{{12}}\n$")
        self.assertEqual(self.run_script("venv_path.sh").stdout, first)
        self.assertEqual(self.run_script("venv_path.sh", VENV="relative/venv").stdout,
                         f"{pathlib.Path.cwd()}/relative/venv\n")

    def test_path_of_the_environment_of_peers(self):
        peers = self.run_script("venv_path.sh", "--peers").stdout
        self.assertRegex(peers, rf"^{self.folder}/cache/ragged_fsdp/peers-[0-9a-f]{{12}}\n$")
        self.assertNotEqual(self.run_script("venv_path.sh", "--peers", VENV="/other").stdout, peers)

    def test_pinned_version_is_the_one_tested_here(self):
        self.assertIn(f"\ntorch=={PINNED}\n", (REPO / "tools" / "requirements.lock").read_text())


if __name__ == "__main__":
    unittest.main()
