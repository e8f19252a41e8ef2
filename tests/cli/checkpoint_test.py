"""Runs that are stopped and killed, and what they leave on disk, from outside: real processes and signals.

    python3 checkpoint_test.py BINARY [unittest arguments]

RAGGED_KILLS says how often the loop kills (default 50).
"""

import json
import os
import random
import signal
import time

from command import TrainingTest, main

KILLS = int(os.environ.get("RAGGED_KILLS", "50"))


class CheckpointTest(TrainingTest):
    def start(self, ranks, *args):
        return self.start_ranks(ranks, "train", "tiny.toml", "--train.log_every=1000000", *args)

    def run_to_end(self, ranks, *args):
        """What rank 0 printed."""
        return self.outputs_of(self.start(ranks, *args))[0]

    def inspect(self, *args):
        return self.ragged("inspect", *args)

    def metrics(self, name):
        path = self.dir / name / "metrics.jsonl"
        return path.read_text() if path.exists() else ""

    def numbers(self, name):
        """Of each step what doesn't depend on the clock."""
        steps = [json.loads(line) for line in self.metrics(name).splitlines()]
        return [(s["step"], s["loss"], s["grad_norm"], s["lr"], s.get("val_loss")) for s in steps]

    def checkpoints(self, name):
        return sorted(p.name for p in (self.dir / name / "checkpoints").iterdir())

    def wait_for(self, condition, process, what):
        deadline = time.monotonic() + 60
        while not condition():
            if process.poll() is not None:
                self.fail(f"ended before {what}: {process.communicate()}")
            self.assertLess(time.monotonic(), deadline, what)
            time.sleep(0.002)

    # --- stopped ---

    def test_signals_save_and_stop_and_the_run_goes_on(self):
        steps = "--train.steps=400"
        self.run_to_end(2, steps, "--run.dir=whole")
        for number, whom in ((signal.SIGTERM, 1), (signal.SIGINT, 0)):
            run = f"--run.dir=run{whom}"
            processes = self.start(2, steps, run, "--checkpoint.every=1000", "--checkpoint.async=true")
            self.wait_for(lambda: self.metrics(f"run{whom}").count("\n") > 3, processes[0], "a few steps")
            processes[whom].send_signal(number)  # one of them only
            outputs = [p.communicate(timeout=60) for p in processes]
            for process, (_, err) in zip(processes, outputs):
                self.assertEqual(process.returncode, 0, err)
            stopped = len(self.numbers(f"run{whom}"))
            self.assertLess(stopped, 400)
            self.assertEqual(self.checkpoints(f"run{whom}"), ["latest", f"step-{stopped}"])
            name = "a signal on another rank" if whom else "SIGINT"
            self.assertIn(f"stopped by {name} after step {stopped}", outputs[0][0])
            self.assertFalse((self.dir / f"run{whom}" / "summary.json").exists())
            out = self.run_to_end(2, steps, run, "--checkpoint.resume=auto")
            self.assertIn(f"step-{stopped}: step {stopped}, saved by 2 ranks", out)
            self.assertEqual(self.numbers(f"run{whom}"), self.numbers("whole"))

    def test_without_checkpoints_signals_end_the_process(self):
        process, = self.start(1, "--train.steps=1000000")
        self.wait_for(lambda: self.metrics("runs/tiny").count("\n") > 3, process, "a few steps")
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)
        self.assertEqual(process.returncode, -signal.SIGTERM)

    # --- killed ---

    def kill_and_resume(self, ranks, kills, *args):
        """Kills a run again and again at random moments, then lets it end; the numbers are those of a run in peace."""
        last = 1500 if ranks == 1 else 300
        steps, name = f"--train.steps={last}", f"killed{ranks}{len(args)}"
        args = (steps, f"--run.dir={name}", "--checkpoint.every=3", "--checkpoint.resume=auto", *args)
        moments = random.Random(17 * ranks + len(args))
        killed_at = []
        for kill in range(kills):
            before = self.metrics(name)
            processes = self.start(ranks, *args)
            if moments.random() < 0.85:
                # While it trains and saves. The others are killed while they start or load.
                self.wait_for(lambda: self.metrics(name) != before, processes[0], "a step")
                time.sleep(moments.uniform(0, 0.05 * ranks**2))
            else:
                time.sleep(moments.uniform(0, 0.5))
            for process in processes:
                process.kill()
            for process in processes:
                _, err = process.communicate()
                if process.returncode == -signal.SIGKILL:
                    continue
                # A rank may see that its peer is gone before it is killed itself; nothing else may go wrong.
                self.assertEqual(process.returncode, 1, err)
                self.assertRegex(err, "all_reduce|all_gather|reduce_scatter|all-|connect|broadcast", f"kill {kill}")
            killed_at.append(self.metrics(name).count("\n"))
            if kill % 10 == 0 and (self.dir / name / "checkpoints" / "latest").exists():
                result = self.inspect(f"{name}/checkpoints", "--verify")
                self.assertEqual(result.returncode, 0, result.stderr)
        self.assertGreater(len(set(killed_at)), kills // 4, "most kills came at the same step")
        self.assertLess(killed_at[-1], last, "it was done before the last kill")
        self.run_to_end(ranks, *args)
        self.assertEqual(self.checkpoints(name), ["latest", f"step-{last - 3}", f"step-{last}"])
        self.run_to_end(ranks, steps, "--run.dir=peace")
        self.assertEqual(self.numbers(name), self.numbers("peace"))

    def test_kill_at_any_moment(self):
        self.kill_and_resume(1, KILLS)

    def test_kill_at_any_moment_while_a_thread_writes(self):
        self.kill_and_resume(1, KILLS // 4, "--checkpoint.async=true")

    def test_kill_all_of_two_ranks_at_any_moment(self):
        self.kill_and_resume(2, KILLS // 4)

    # --- other ranks, other optimizers ---

    def test_goes_on_with_other_numbers_of_ranks(self):
        run = ("--run.dir=run", "--checkpoint.every=2", "--checkpoint.resume=auto")
        for ranks, steps in ((1, 2), (3, 4), (2, 6), (4, 8)):
            out = self.run_to_end(ranks, *run, f"--train.steps={steps}")
            if steps > 2:
                self.assertIn(f"step-{steps - 2}: step {steps - 2}", out)
                self.assertIn(f"changed since: train.steps: {steps - 2} -> {steps}", out)
        self.assertEqual([step[0] for step in self.numbers("run")], list(range(1, 9)))

    # --- inspect ---

    def test_inspect_shows_and_verifies(self):
        self.run_to_end(2, "--run.dir=run", "--checkpoint.every=2", "--optimizer.moment_dtype=bf16")
        result = self.inspect("run/checkpoints")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("step-3: step 3, saved by 2 ranks", result.stdout)
        self.assertRegex(result.stdout, r"embed_tokens\.weight +F32 +256x24 +- +24,576  RaggedShard\(")
        self.assertRegex(result.stdout, r"state\.embed_tokens\.weight\.exp_avg_sq +BF16 +256x24 ")
        self.assertIn("parameters: 21 tensors, 18,360 elements, 73,440 bytes", result.stdout)
        self.assertNotIn("verified", result.stdout)
        result = self.inspect("run/checkpoints/step-2", "--verify", "--facts")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("verified: all 146,880 bytes", result.stdout)
        self.assertIn("[train]\n", result.stdout)

    def test_inspect_names_what_is_damaged(self):
        self.run_to_end(1, "--run.dir=run", "--checkpoint.every=3")
        folder = self.dir / "run" / "checkpoints" / "step-3"
        file = next(folder.glob("*.safetensors"))
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        self.assertEqual(self.inspect("run/checkpoints/step-3").returncode, 0)
        result = self.inspect("run/checkpoints/step-3", "--verify")
        self.assertEqual(result.returncode, 1)
        self.assertRegex(result.stderr, rf"^ragged: error: .*tensor 'state\..*{file.name}.*\n$")
        resumed, = self.start(1, "--run.dir=run", "--checkpoint.resume=auto", "--train.steps=5")
        _, err = resumed.communicate(timeout=60)
        self.assertEqual(resumed.returncode, 1)
        self.assertIn(file.name, err)
        self.assertEqual(len(self.numbers("run")), 3, "the failed resume touched the run")

    def test_inspect_of_nothing(self):
        for args in (["nowhere"], ["."], ["text.txt"]):
            result = self.inspect(*args)
            self.assertEqual(result.returncode, 1)
            self.assertEqual(result.stderr.count("\n"), 1, result.stderr)
            self.assertIn(args[0], result.stderr)


if __name__ == "__main__":
    main()
