"""The commands that answer before a launch, from outside: plan, simulate and tune.

    python3 tools_test.py BINARY [--update-golden] [unittest arguments]
"""

import json
import os
import pathlib
import pty
import re
import struct
import subprocess
import sys
import tomllib
import xml.etree.ElementTree

import command

UPDATE_GOLDEN = False
HERE = pathlib.Path(__file__).resolve().parent

SMALL = {
    "format": 1, "name": "small", "dtype": "float32",
    "units": [
        {"name": "embed", "params": [{"name": "e.weight", "shape": [50, 8], "kind": "embedding", "role": "embed"}]},
        {"name": "layers.*", "prefix": "layers.*.", "count": 3, "params": [
            {"name": "w", "shape": [24, 8], "kind": "matrix", "role": "mlp"},
            {"name": "norm", "shape": [8], "kind": "vector", "role": "norm"}]}]}


def safetensors(tensors, data=None, length=None):
    """A file's bytes: float32 tensors by name and shape, without values."""
    header, end = {}, 0
    for name, shape in tensors.items():
        size = 4
        for n in shape:
            size *= n
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + bytes(end if data is None else data)


class ToolsTest(command.CommandTest):
    maxDiff = None

    def text(self, *args):
        result = self.ragged(*args)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(result.stderr, "")
        return result.stdout

    def json(self, *args):
        return json.loads(self.text(*args, "--json"))

    def write(self, name, content):
        if isinstance(content, bytes):
            (self.dir / name).write_bytes(content)
        else:
            (self.dir / name).write_text(content if isinstance(content, str) else json.dumps(content))
        return name

    def assert_fails(self, args, *fragments, code=2):
        result = self.ragged(*args)
        self.assertEqual(result.returncode, code, result.stderr)
        self.assertEqual(result.stdout, "")
        self.assertEqual(result.stderr.count("\n"), 1, "one line, not: " + result.stderr)
        self.assertTrue(result.stderr.startswith("ragged: error: "), result.stderr)
        for fragment in fragments:
            self.assertIn(fragment, result.stderr)

    def assert_golden(self, text, name):
        path = HERE / "golden" / name
        text = re.sub(r"planned in .*", "planned in ...", text)
        if UPDATE_GOLDEN:
            path.write_text(text)
        self.assertEqual(text, path.read_text(), f"{name}: --update-golden rewrites it")

    # --- what they print ---

    def test_help_is_as_recorded(self):
        for command in ("plan", "simulate", "tune"):
            self.assert_golden(self.text(command, "--help"), f"{command}_help.txt")

    def test_output_is_as_recorded(self):
        self.assert_golden(
            self.text("plan", "smollm-135m", "--ranks", 4, "--rows", 32, "--compare"), "plan_smollm.txt")
        self.assert_golden(self.text("simulate", "smollm-135m", "--ranks", 16), "simulate_smollm.txt")
        self.assert_golden(
            self.text("tune", "smollm-135m", "--ranks", 8, "--rows", 32, "--device", "a100"), "tune_smollm.txt")

    def test_colours_only_for_a_person_who_wants_them(self):
        def on_a_terminal(**env):
            main, other = pty.openpty()
            subprocess.run(
                [self.binary, "plan", "gpt2-124m", "--ranks", "2"], env=command.clean_environment(TERM="xterm", **env), stdout=other,
                timeout=60, check=True)
            os.close(other)
            text = b""
            try:
                while chunk := os.read(main, 65536):
                    text += chunk
            except OSError:  # the other side is closed
                pass
            os.close(main)
            return text

        self.assertIn(b"\x1b[1m", on_a_terminal())
        self.assertNotIn(b"\x1b", on_a_terminal(NO_COLOR="1"))
        self.assertNotIn("\x1b", self.text("plan", "gpt2-124m", "--ranks", 2))

    def test_json_fields_are_stable(self):
        plan = self.json("plan", "gpt-oss-120b-hf-fused", "--ranks", 256, "--rows", 16, "--compare")
        for field in ("padding", "lower_bound", "collectives", "seconds", "units", "blocks_cut", "bytes_per_rank"):
            self.assertIn(field, plan)
        self.assertLessEqual(plan["padding"], 0.0025)
        self.assertEqual(plan["blocks_cut"], 0)
        self.assertEqual(len(plan["compare"]), 8)
        step = self.json("simulate", "llama-3-8b", "--ranks", 64)
        for field in ("peak_bytes", "at_peak", "peak_during", "seconds", "exposed_seconds", "advice"):
            self.assertIn(field, step)
        tuned = self.json("tune", "llama-3-8b", "--ranks", 16)
        for field in ("recommended", "reasons", "front", "groups", "fits"):
            self.assertIn(field, tuned)

    def test_strategies_flags_and_buckets_matter(self):
        def padding(*args):
            return self.json("plan", "llama-3-70b", "--ranks", 1024, "--rows", 16, *args)["padding"]

        self.assertLessEqual(padding(), 0.096)
        self.assertLessEqual(padding("--layers-per-bucket", 2), 0.020)
        self.assertLessEqual(padding("--layers-per-bucket", 4), 0.0031)
        self.assertGreaterEqual(padding("--strategy", "paper"), padding("--strategy", "single"))
        self.assertGreaterEqual(padding("--strategy", "single"), padding("--ragged-blocks", 0))

    def test_remarks_name_the_remedy(self):
        self.assertIn("--rows 64", self.text("plan", "gpt-oss-120b-hf-fused", "--ranks", 64, "--rows", 128))
        self.assertIn("more than a fair share", self.text("plan", "llama-3-8b", "--ranks", 1024, "--rows", 128))

    def test_files_that_they_write(self):
        self.text("plan", "gpt-oss-20b-fused", "--ranks", 64, "--svg", "plan.svg")
        self.text("simulate", "gpt2-124m", "--ranks", 4, "--svg", "step.svg", "--trace", "trace.json")
        for name in ("plan.svg", "step.svg"):
            root = xml.etree.ElementTree.parse(self.dir / name).getroot()
            self.assertTrue(root.tag.endswith("svg"))
            self.assertLess((self.dir / name).stat().st_size, 120_000)
        self.assertTrue(json.loads((self.dir / "trace.json").read_text())["traceEvents"])
        self.assertEqual(sorted(p.name for p in self.dir.iterdir()), ["plan.svg", "step.svg", "trace.json"])
        self.assert_fails(["plan", "gpt2-124m", "--ranks", 2, "--svg", "nowhere/x.svg"], "nowhere/x.svg")

    # --- where shapes come from ---

    def test_inventories_and_safetensors_of_ones_own(self):
        self.write("small.json", SMALL)
        self.assertEqual(self.json("plan", "small.json", "--ranks", 2)["parameters"], 400 + 3 * 200)
        self.write("one.safetensors", safetensors({"layers.0.w": [6, 4], "layers.1.w": [6, 4]}))
        self.write("two.safetensors", safetensors({"embed.weight": [10, 4], "norm.weight": [4]}))
        plan = self.json("plan", "one.safetensors", "--ranks", 2)
        self.assertEqual([(u["name"], u["count"]) for u in plan["units"]], [("layers.0-1", 2)])
        self.write("model.safetensors.index.json", {"weight_map": {
            "layers.0.w": "one.safetensors", "layers.1.w": "one.safetensors", "embed.weight": "two.safetensors",
            "norm.weight": "two.safetensors"}})
        for source in ("model.safetensors.index.json", "."):
            self.assertEqual(self.json("plan", source, "--ranks", 3)["parameters"], 48 + 44)
        self.assertGreater(self.json("simulate", ".", "--ranks", 2, "--device", "cpu")["peak_bytes"], 0)

    # --- bad calls ---

    def test_unknown_models(self):
        self.assert_fails(["plan", "lama-3-8b", "--ranks", 4], "Did you mean 'llama-3-8b'?")
        self.assert_fails(["plan", "no/such/file.json", "--ranks", 4], "no/such/file.json")
        self.assert_fails(["plan", "--ranks", 4], "MODEL")
        self.assert_fails(["plan", "gpt2-124m"], "--ranks")

    def test_counts_out_of_range(self):
        for command in ("plan", "simulate", "tune"):
            self.assert_fails([command, "gpt2-124m", "--ranks", 0], "at least 1 rank", "--ranks")
            self.assert_fails([command, "gpt2-124m", "--ranks", -8], "at least 1 rank")
            self.assert_fails([command, "gpt2-124m", "--ranks", "many"], "many")
            self.assert_fails([command, "gpt2-124m", "--ranks", 4, "--rows", 0], "--rows")
        self.assert_fails(["plan", "gpt2-124m", "--ranks", 4, "--layers-per-bucket", 0], "--layers-per-bucket")
        self.assert_fails(["plan", "gpt2-124m", "--ranks", 4, "--strategy", "best"], "--strategy")
        self.assert_fails(["simulate", "gpt2-124m", "--ranks", 4, "--shard", 3], "--shard")
        self.assert_fails(["simulate", "gpt2-124m", "--ranks", 4, "--tokens", 0], "--tokens")
        self.assert_fails(["simulate", "gpt2-124m", "--ranks", 4, "--prefetch", -1], "--prefetch")
        self.assert_fails(["simulate", "gpt2-124m", "--ranks", 4, "--device", "h10"], "Did you mean 'h100'?")
        self.assert_fails(["simulate", "gpt2-124m", "--ranks", 4, "--optimizer", "adam"], "adamw")
        self.assert_fails(["simulate", "gpt2-124m", "--ranks", 4, "--checkpointing", "some"], "none or full")
        self.assert_fails(["tune", "gpt2-124m", "--ranks", 4, "--memory", "80 apples"], "--memory")

    def test_damaged_safetensors(self):
        whole = safetensors({"w": [6, 4]})
        for name, content, fragment in (
                ("short", whole[:5], "at least 8 bytes"),
                ("cut", whole[:30], "truncated"),
                ("data", whole[:-1], "truncated"),
                ("more", whole + b"x", "damaged"),
                ("huge", safetensors({"w": [6, 4]}, length=2**62), "at most 100000000"),
                ("text", b"\x02\0\0\0\0\0\0\0[]", "named tensors")):
            self.write(f"{name}.safetensors", content)
            self.assert_fails(["plan", f"{name}.safetensors", "--ranks", 2], fragment, f"{name}.safetensors")

    def test_bad_inventories(self):
        def with_tensors(*tensors):
            return {"format": 1, "units": [{"name": "u", "params": list(tensors)}]}

        w = {"name": "w", "shape": [4, 4]}
        for name, content, fragment in (
                ("twice.json", with_tensors(w, w), "'w' twice"),
                ("negative.json", with_tensors({"name": "w", "shape": [4, -4]}), "-4"),
                ("empty.json", with_tensors(), "with parameters"),
                ("text.json", "{", "JSON")):
            self.write(name, content)
            self.assert_fails(["plan", name, "--ranks", 2], fragment)

    # --- against a run ---

    def test_images_and_traffic_are_those_of_a_real_run(self):
        """The demo's model on 4 ranks: what the step moves and the largest unsharded images, exactly;
        what stays on a rank within 5 %."""
        demo = HERE.parent.parent / "configs" / "demo.toml"
        model = tomllib.loads(demo.read_text())["model"]
        dim, ff = model["dim"], model["feed_forward"]
        kv = dim // model["heads"] * model["kv_heads"]

        def matrix(name, *shape, role="mlp"):
            return {"name": name, "shape": list(shape), "kind": "matrix", "role": role}

        def norm(name):
            return {"name": name, "shape": [dim], "kind": "vector", "role": "norm"}

        layer = [
            norm("input_layernorm.weight"), matrix("q_proj.weight", dim, dim, role="attn"),
            matrix("k_proj.weight", kv, dim, role="attn"), matrix("v_proj.weight", kv, dim, role="attn"),
            matrix("o_proj.weight", dim, dim, role="attn"), norm("post_attention_layernorm.weight"),
            matrix("gate_proj.weight", ff, dim), matrix("up_proj.weight", ff, dim), matrix("down_proj.weight", dim, ff)]
        self.write("demo.json", {"format": 1, "name": "demo", "units": [
            {"name": "root", "params": [
                {"name": "embed_tokens.weight", "shape": [256, dim], "kind": "embedding", "role": "embed"},
                norm("norm.weight"), matrix("lm_head.weight", 256, dim, role="head")]},
            {"name": "layers.*", "prefix": "layers.*.", "count": model["layers"], "params": layer}]})
        self.outputs_of(self.start_ranks(
            4, "train", demo, "--train.steps=1", "--train.batch=1", "--train.sequence=16", "--eval.sequences=4",
            "--eval.sample_bytes=1", "--train.param_dtype=bf16", "--train.reduce_dtype=fp32",
            "--parallel.forward_prefetch=1", "--parallel.merge_bytes=0", "--parallel.rows=1", "--run.device=cpu",
            "--run.dir=run"))
        measured = json.loads((self.dir / "run/summary.json").read_text())["measured"]
        step = self.json("simulate", "demo.json", "--ranks", 4, "--device", "cpu", "--tokens", 16)
        self.assertEqual(step["gathered_bytes"], measured["gathered_bytes"])
        self.assertEqual(step["reduced_bytes"], measured["reduced_bytes"])
        self.assertEqual(step["highest"]["images"], measured["peak_image_bytes"])
        plan = self.json("plan", "demo.json", "--ranks", 4)["bytes_per_rank"]
        held = measured["persistent_bytes"]
        for ours, simulated, planned in (
                ("parameters", step["highest"]["parameters"], plan["parameters"]),
                ("gradients", step["highest"]["gradients"], plan["gradients"]),
                ("optimizer_states", step["highest"]["optimizer"], plan["optimizer"]["adamw"])):
            self.assertAlmostEqual(simulated / held[ours], 1.0, delta=0.05, msg=ours)
            self.assertAlmostEqual(planned / held[ours], 1.0, delta=0.05, msg=ours)


if __name__ == "__main__":
    if "--update-golden" in sys.argv:
        sys.argv.remove("--update-golden")
        UPDATE_GOLDEN = True
    command.main()
