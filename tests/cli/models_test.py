"""Models of others in and out, from outside: what the commands print, exit codes, and what lies on disk.

    python3 models_test.py BINARY [unittest arguments]

Whether transformers computes the same is tests/python/test_hf_models.py's question.
"""

import json
import shutil
import subprocess

from command import CONFIG, TrainingTest, clean_environment, main

MOE = ("--model.kind=moe", "--model.experts=5")
KINDS = {
    "llama": (),
    "tied": ("--model.tied_embeddings=true",),
    "gpt_oss": MOE,
    "mixtral": (*MOE, "--model.expert_biases=false"),
}


class ModelsTest(TrainingTest):
    def run_ranks(self, *args, ranks=1):
        """The result on the highest rank."""
        if ranks == 1:
            return self.ragged(*args)
        for process in self.start_ranks(ranks, *args):
            out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(args, process.returncode, out, err)

    def succeed(self, *args, ranks=1):
        result = self.run_ranks(*args, ranks=ranks)
        self.assertEqual(result.returncode, 0, result.stderr)
        return result.stdout

    def fail_with(self, code, pattern, *args, ranks=1):
        result = self.run_ranks(*args, ranks=ranks)
        self.assertEqual(result.returncode, code, result.stderr)
        self.assertRegex(result.stderr, rf"^ragged: error: .*{pattern}.*\n$")
        self.assertEqual(result.stderr.count("\n"), 1, result.stderr)

    def trained(self, *args, name="run"):
        self.succeed("train", "tiny.toml", f"--run.dir={name}", "--checkpoint.every=3", *args)
        return f"{name}/checkpoints"

    def files(self, name):
        return {p.name: p.read_bytes() for p in (self.dir / name).iterdir()}

    # --- there and back ---

    def test_the_same_bytes_come_back_through_any_number_of_ranks(self):
        for kind, args in KINDS.items():
            checkpoints = self.trained(*args, name=kind)
            said = self.succeed("export", checkpoints, f"{kind}.hf", "--max-file-size", "20000")
            self.assertRegex(said, rf"^{kind}.hf: step 3 as \w+CausalLM: \d+ tensors, [\d,]+ bytes of F32 in \d+ files")
            said = self.succeed("import", f"{kind}.hf", f"{kind}.toml")
            self.assertIn(f"train it with: ragged train {kind}.toml", said)
            self.assertNotIn("note:", said)
            config = self.dir / f"{kind}.toml"
            config.write_text(config.read_text() + CONFIG[CONFIG.index("[data]"):])
            for ranks in (1, 2, 3, 4) if kind == "gpt_oss" else (3,):
                # Small enough for every sum to round back to where it was.
                run = f"{kind}-{ranks}"
                self.succeed("train", f"{kind}.toml", f"--run.dir={run}", "--train.lr=1e-30", "--train.steps=1",
                             "--checkpoint.every=1", ranks=ranks)
                self.succeed("export", f"{run}/checkpoints", f"{run}.hf", "--max-file-size", "20000")
                before, after = self.files(f"{kind}.hf"), self.files(f"{run}.hf")
                self.assertEqual(before.keys(), after.keys())
                for name in before:
                    self.assertEqual(before[name], after[name], f"{name} on {ranks} ranks")

    def test_a_run_starts_from_the_weights_and_goes_on_from_its_own(self):
        checkpoints = self.trained("--train.lr=0.02")
        last = json.loads((self.dir / "run/metrics.jsonl").read_text().splitlines()[-1])["val_loss"]
        self.succeed("export", checkpoints, "out")
        args = ("train", "tiny.toml", "--model.from=out", "--run.dir=next", "--checkpoint.every=2",
                "--checkpoint.resume=auto")
        said = self.succeed(*args, "--train.steps=2")
        self.assertIn("weights of 'out' (LlamaForCausalLM, ", said)
        self.assertIn(f"validation loss before training: {last:.4f}", said)
        (self.dir / "out").rename(self.dir / "elsewhere")
        said = self.succeed(*args, "--train.steps=4")
        self.assertIn("step-2: step 2", said)
        self.assertNotIn("weights of", said)

    # --- calls that can't be ---

    def test_export_refuses_by_name_and_overwrites_nothing(self):
        checkpoints = self.trained()
        self.fail_with(1, "nowhere", "export", "nowhere", "out")
        self.fail_with(2, "int4", "export", checkpoints, "out", "--dtype=int4")
        self.fail_with(2, "gguf", "export", checkpoints, "out", "--to=gguf")
        self.fail_with(2, "--max-file-size.*'big'", "export", checkpoints, "out", "--max-file-size=big")
        self.fail_with(2, "--tokenizer", "export", checkpoints, "out", "--tokenizer=.")
        self.assertEqual(list(self.dir.glob("*out*")), [])
        (self.dir / "out").mkdir()
        (self.dir / "out" / "mine").write_text("x")
        self.fail_with(1, "'out'.*Nothing is overwritten", "export", checkpoints, "out")
        self.assertEqual(list(self.files("out")), ["mine"])
        file = next((self.dir / checkpoints / "step-3").glob("*.safetensors"))
        data = bytearray(file.read_bytes())
        data[8 + int.from_bytes(data[:8], "little")] ^= 1  # of the first tensor; states come last
        file.write_bytes(data)
        self.fail_with(1, file.name, "export", checkpoints, "other")
        self.assertEqual(list(self.dir.glob("*other*")), [])

    def test_import_refuses_by_name_and_overwrites_nothing(self):
        self.succeed("export", self.trained(), "out")
        self.fail_with(2, "'tiny.toml' does", "import", "out", "tiny.toml")
        self.assertEqual((self.dir / "tiny.toml").read_text(), CONFIG)
        self.fail_with(1, "nowhere/config.json", "import", "nowhere", "new.toml")
        self.assertIn('[model]\nkind = "llama"\nfrom = "', self.succeed("import", "out"))
        config = json.loads((self.dir / "out/config.json").read_text())
        for change, code, pattern in (
            ({"intermediate_size": 30}, 1, r"gate_proj.weight' of shape \[30, 24\].*\[20, 24\]"),
            ({"num_hidden_layers": 3}, 1, r"Expected a tensor 'model.layers.2"),
            ({"num_hidden_layers": 1}, 1, r"Expected only tensors of a LlamaForCausalLM, but got 'model.layers.1"),
            ({"architectures": ["GPT2LMHeadModel"]}, 2, "GPT2LMHeadModel"),
        ):
            (self.dir / "out/config.json").write_text(json.dumps({**config, **change}))
            self.fail_with(code, pattern, "import", "out", "new.toml")
        self.assertFalse((self.dir / "new.toml").exists())

    def test_training_from_weights_that_dont_fit_stops_every_rank(self):
        self.succeed("export", self.trained(), "out")
        args = ("train", "tiny.toml", "--run.dir=next", "--model.from=out")
        self.fail_with(2, r"dim: 36 -> 24.*'model.from'.*ragged import out", *args, "--model.dim=36", ranks=2)
        (self.dir / "out/model.safetensors").write_bytes(b"12345678")
        self.fail_with(1, "out/model.safetensors", *args, ranks=2)
        self.assertFalse((self.dir / "next/metrics.jsonl").exists())

    # --- killed ---

    def test_a_killed_export_leaves_no_folder_and_the_next_one_works(self):
        checkpoints = self.trained("--model.vocabulary=200000", "--train.steps=3")
        killed = 0
        for threshold in (0, 1 << 20, 10 << 20, 20 << 20):  # bytes of weights, of 38 MB
            process = subprocess.Popen(
                [self.binary, "export", checkpoints, "out"], cwd=self.dir, env=clean_environment(), stdout=subprocess.PIPE)
            while process.poll() is None:
                try:
                    is_time = (self.dir / ".tmp-out" / "model.safetensors").stat().st_size > threshold
                except FileNotFoundError:  # not yet, or no more
                    continue
                if is_time:
                    process.kill()
                    break
            process.communicate(timeout=60)
            if (self.dir / "out").exists():  # it was done before
                self.succeed("import", "out")
                shutil.rmtree(self.dir / "out")
            else:
                killed += 1
        self.assertGreater(killed, 0, "every kill came too late")
        self.succeed("export", checkpoints, "out")
        self.assertEqual(list(self.dir.glob(".tmp*")), [])
        self.succeed("import", "out")


if __name__ == "__main__":
    main()
