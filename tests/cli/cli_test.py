"""The command `ragged` from outside: exit codes, messages, files, and ranks that die.

    python3 cli_test.py BINARY [--update-golden] [unittest arguments]
"""

import json
import os
import pathlib
import signal
import sys
import time
import unittest
import unittest.mock

import command

UPDATE_GOLDEN = False
HERE = pathlib.Path(__file__).resolve().parent


class CliTest(command.TrainingTest):
    def start_training(self, ranks, *args):
        return self.start_ranks(ranks, "train", "tiny.toml", *args)

    def run_training(self, ranks, *args):
        return self.outputs_of(self.start_training(ranks, *args))

    def steps(self, name="tiny"):
        return [json.loads(line) for line in (self.dir / "runs" / name / "metrics.jsonl").read_text().splitlines()]

    def summary(self, name="tiny"):
        return json.loads((self.dir / "runs" / name / "summary.json").read_text())

    def assert_fails(self, result, code, *fragments):
        self.assertEqual(result.returncode, code, result.stderr)
        self.assertEqual(result.stderr.count("\n"), 1, "one line, not: " + result.stderr)
        self.assertTrue(result.stderr.startswith("ragged: error: "), result.stderr)
        for fragment in fragments:
            self.assertIn(fragment, result.stderr)
        self.assertFalse((self.dir / "runs").exists(), "something was written")

    def assert_golden(self, text, name):
        path = HERE / "golden" / name
        if UPDATE_GOLDEN:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        self.assertEqual(text, path.read_text(), f"{name}: --update-golden rewrites it")

    # --- what it prints ---

    def test_help_is_as_recorded(self):
        for args, name in ((["--help"], "help.txt"), (["train", "--help"], "train_help.txt")):
            result = self.ragged(*args)
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assert_golden(result.stdout, name)

    def test_version(self):
        result = self.ragged("--version")
        self.assertEqual(result.returncode, 0)
        self.assertRegex(result.stdout, r"^ragged \d+\.\d+\.\d+\n$")

    # --- bad calls: exit code 2, one line, nothing written ---

    def test_no_command_or_an_unknown_one(self):
        self.assert_fails(self.ragged(), 2, "--help")
        self.assert_fails(self.ragged("trian", "tiny.toml"), 2, "--help")
        self.assert_fails(self.ragged("train"), 2, "CONFIG")

    def test_missing_config_file(self):
        self.assert_fails(self.ragged("train", "nowhere.toml"), 2, "nowhere.toml")

    def test_unknown_key_suggests_the_nearest(self):
        self.assert_fails(self.ragged("train", "tiny.toml", "--train.step=3"), 2, "train.step", "train.steps")
        (self.dir / "tiny.toml").write_text("[modle]\ndim = 8\n")
        self.assert_fails(self.ragged("train", "tiny.toml"), 2, "modle", "model", "line 1")

    def test_wrong_values(self):
        self.assert_fails(self.ragged("train", "tiny.toml", "--train.steps=ten"), 2, "an integer >= 1", "ten")
        self.assert_fails(self.ragged("train", "tiny.toml", "--model.kv_heads=4"), 2, "model.kv_heads")
        self.assert_fails(self.ragged("train", "tiny.toml", "steps=4"), 2, "--section.key=value")

    def test_rules_of_the_optimizer(self):
        def fails(rule, *fragments):
            (self.dir / "ruled.toml").write_text(command.CONFIG + "[[optimizer.rules]]\n" + rule)
            self.assert_fails(self.ragged("train", "ruled.toml"), 2, *fragments)

        fails("match = 'self_atn'\nkind = 'muon'\n", "'self_atn'", "matches none", "nearest name")
        fails("match = 'norm'\nkind = 'muon'\n", "layers.0.input_layernorm.weight", "[24]", 'kind = "adamw"')
        fails("match = 'q_proj'\nkind = 'moun'\n", "moun", "one of adamw", "optimizer.rules[0].kind")
        fails("match = '('\n", "regular expression", "optimizer.rules[0]")
        fails("kind = 'muon'\n", "'match'", "line ")
        fails("match = 'q_proj'\nkind = 'muon'\nsplits = [20, 3]\n", "24 rows", "[20, 3]", "q_proj")
        result = self.ragged("train", "tiny.toml", "--optimizer.rules=[]")
        self.assert_fails(result, 2, "command line", "[[optimizer.rules]]")

    def test_missing_data_file(self):
        self.assert_fails(self.ragged("train", "tiny.toml", "--data.path=nowhere.txt"), 2, "nowhere.txt", "data.path")

    def test_too_little_text(self):
        (self.dir / "text.txt").write_text("short")
        self.assert_fails(self.ragged("train", "tiny.toml"), 2, "text.txt", "train.sequence")

    def test_world_size_zero(self):
        result = self.ragged("train", "tiny.toml", RANK="0", WORLD_SIZE="0")
        self.assert_fails(result, 2, "WORLD_SIZE", "0")

    def test_half_set_environment(self):
        self.assert_fails(self.ragged("train", "tiny.toml", WORLD_SIZE="2"), 2, "RANK")
        self.assert_fails(self.ragged("train", "tiny.toml", RANK="0", WORLD_SIZE="2"), 2, "MASTER_")

    # --- failures: exit code 1, one line ---

    def test_loss_that_is_not_finite(self):
        result = self.ragged("train", "tiny.toml", "--train.lr=1e30", "--train.warmup=0")
        self.assertEqual(result.returncode, 1, result.stderr)
        self.assertEqual(result.stderr.count("\n"), 1, result.stderr)
        self.assertIn("finite loss", result.stderr)
        self.assertFalse((self.dir / "runs/tiny/summary.json").exists())

    # --- runs ---

    def test_every_optimizer_runs_and_says_what_it_holds(self):
        for kind in ("adamw", "adamw8bit", "muon", "soap"):
            with self.subTest(kind):
                outputs = self.run_training(2, f"--optimizer.kind={kind}", f"--run.dir=runs/{kind}")
                self.assertRegex(outputs[0], r"layers\.\*\.self_attn\.q_proj\.weight +x 2 +24 x 24 +" + kind)
                summary = self.summary(kind)
                self.assertEqual(summary["planned"], summary["measured"])
                held = summary["measured"]["persistent_bytes"]
                self.assertEqual(held["total"], held["parameters"] + held["gradients"] + held["optimizer_states"])
                self.assertEqual(summary["optimizer"], kind)

    def test_one_process_needs_no_launcher(self):
        result = self.ragged("train", "tiny.toml")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual([step["step"] for step in self.steps()], [1, 2, 3])
        self.assertEqual(self.summary()["planned"], self.summary()["measured"])
        self.assertNotIn("\x1b", result.stdout, "colours, though nobody looks")

    def test_configs_of_the_repository_run(self):
        configs = sorted((HERE.parent.parent / "configs").glob("*.toml"))
        self.assertTrue(configs)
        for config in configs:
            with self.subTest(config.name):
                result = self.ragged(
                    "train", str(config), "--train.steps=1", "--train.batch=1", "--train.sequence=32",
                    "--eval.sequences=1", "--eval.sample_bytes=2")
                self.assertEqual(result.returncode, 0, result.stderr)
                self.assertEqual(self.summary(config.stem)["planned"], self.summary(config.stem)["measured"])

    def test_ranks_compare_their_order_when_asked(self):
        with unittest.mock.patch.dict(os.environ, RAGGED_CHECK="1"):
            self.run_training(2)

    def test_resolved_config_is_printed_and_accepted_back(self):
        result = self.ragged("train", "tiny.toml", "--train.steps=2", "--run.dir=runs/first")
        self.assertEqual(result.returncode, 0, result.stderr)
        resolved = (self.dir / "runs/first/config.toml").read_text()
        self.assertIn("steps = 2\n", resolved)
        self.assertIn(resolved, result.stdout)
        result = self.ragged("train", "runs/first/config.toml", "--run.dir=runs/second")
        self.assertEqual(result.returncode, 0, result.stderr)
        again = (self.dir / "runs/second/config.toml").read_text()
        self.assertEqual(again, resolved.replace("runs/first", "runs/second"))
        self.assertEqual([s["loss"] for s in self.steps("first")], [s["loss"] for s in self.steps("second")])

    def test_processes_agree_with_one_at_the_same_global_batch(self):
        losses = []
        for ranks in (1, 2, 4):
            outputs = self.run_training(ranks, f"--train.batch={4 // ranks}")
            self.assertEqual([len(out) > 0 for out in outputs], [True] + [False] * (ranks - 1))
            self.assertEqual(self.summary()["planned"], self.summary()["measured"])
            losses.append([step["loss"] for step in self.steps()])
        for other in losses[1:]:
            self.assertLess(abs(other[0] - losses[0][0]), 1e-6 * losses[0][0])
            for a, b in zip(losses[0], other):
                self.assertLess(abs(a - b), 1e-5 * a)

    # --- ranks that go away ---

    def lose_a_rank(self, number, *args):
        """Sends the signal to rank 1 of 2 in the middle of a run; returns what rank 0 then says, and when."""
        survivor, victim = self.start_training(2, "--train.steps=1000000", "--train.log_every=1000000", *args)
        metrics = self.dir / "runs/tiny/metrics.jsonl"
        deadline = time.monotonic() + 60
        while not metrics.exists() or metrics.read_text().count("\n") < 3:
            self.assertIsNone(survivor.poll(), "died early")
            self.assertLess(time.monotonic(), deadline, "no steps")
            time.sleep(0.05)
        victim.send_signal(number)
        start = time.monotonic()
        _, err = survivor.communicate(timeout=60)
        self.assertEqual(survivor.returncode, 1, err)
        self.assertEqual(err.count("\n"), 1, err)
        self.assertRegex(err, r"rank 0 of 2")
        self.assertRegex(err, r"all_gather|reduce_scatter|all_reduce|all-gather|reduce-scatter|all-reduce")
        return err, time.monotonic() - start

    def test_rank_that_dies_is_an_error_of_the_others(self):
        _, seconds = self.lose_a_rank(signal.SIGKILL, "--parallel.timeout_s=20")
        self.assertLess(seconds, 25)

    def test_rank_that_stalls_is_an_error_of_the_others(self):
        _, seconds = self.lose_a_rank(signal.SIGSTOP, "--parallel.timeout_s=3")
        self.assertLess(seconds, 20)


if __name__ == "__main__":
    if "--update-golden" in sys.argv:
        sys.argv.remove("--update-golden")
        UPDATE_GOLDEN = True
    command.main()
