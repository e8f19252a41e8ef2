"""Feeds the page of bench/peers lines made by hand and looks at what it says. And docs/peers.md is that of the lines
kept.
"""

import json
import os
import pathlib
import re
import subprocess
import sys
import unittest
import xml.etree.ElementTree

REPO = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

from bench.peers import figures, page, results  # noqa: E402
from bench.peers.catalogue import CELLS, SYSTEMS  # noqa: E402
from bench.peers.targets import targets  # noqa: E402

CELL = CELLS["llama-fp32-2"]
MIB = 2**20
P = 10 * MIB


def rank(**changes):
    return {
        "parameter_bytes": P, "trainable_elements": P // 4, "peak_bytes": 40 * MIB, "bytes_at_rest": 20 * MIB,
        "copied": MIB, "copied_by": {}, "backend_results": 0, "collectives": {"allgather_base": [3, 2 * P]},
        "reduced_elements": P // 4, "operations": 1, "wrap_s": 0.1} | changes  # fmt: skip


def line(system, cell=CELL, wall=(100.0, 120.0, 90.0), cpu=50.0, update=5.0, loss=0.0, repeat=0, **counts):
    rounds = [[{"wall_ms": ms, "cpu_ms": cpu, "update_cpu_ms": update}, {"wall_ms": ms - 1, "cpu_ms": cpu + 2,
               "update_cpu_ms": update}] for ms in wall]  # fmt: skip
    return {"cell": cell.name, "system": system, "repeat": repeat, "started": "2026-11-30T00:00:00Z",
            "other_cores": 0.1, "steps_a_round": 5, "rounds": rounds, "ranks": [rank(**counts), rank(**counts)],
            "loss_difference": loss}  # fmt: skip


CONDITIONS = {"conditions": {
    "python": "3.11", "versions": {"torch": "2.15.0"}, "cores": 2, "cpu": "a CPU", "features": ["avx2"],
    "build": "with -O3", "omp_num_threads": "1"}}  # fmt: skip


def some():
    return [CONDITIONS, line("single", cpu=20.0, copied=MIB), line("fsdp2", copied=MIB + 4 * P),
            line("ragged", wall=(50.0, 60.0, 55.0), cpu=35.0, copied=MIB + P, peak_bytes=30 * MIB,
                 collectives={"broadcast": [6, 2 * P], "alltoall_base": [3, P]})]  # fmt: skip


class PageTest(unittest.TestCase):
    def rows(self, lines, cell=CELL):
        return results.Results(lines).rows(cell)

    def test_medians_ranges_and_what_the_unsharded_run_takes(self):
        row = self.rows(some())["fsdp2"]
        self.assertEqual((row.wall.median, row.wall.low, row.wall.high), (100.0, 90.0, 120.0))
        self.assertEqual(row.cpu.median, 51.0)  # the mean over ranks
        self.assertEqual(row.above, (51.0 - 5.0) - (21.0 - 5.0))
        self.assertEqual(row.copied, 4 * P)
        self.assertEqual(row.padding, 0.0)
        self.assertEqual((row.collectives, row.payload), (3, 2 * P))

    def test_repeats_are_put_together(self):
        lines = [*some(), line("fsdp2", wall=(400.0,), peak_bytes=60 * MIB, loss=1e-7, repeat=1)]
        row = self.rows(lines)["fsdp2"]
        self.assertEqual((row.wall.median, row.wall.high), (110.0, 400.0))
        self.assertEqual((row.peak, row.loss_difference), (50 * MIB, 1e-7))

    def test_an_error_is_a_row_and_no_target(self):
        failed = {"cell": CELL.name, "system": "deepspeed", "error": "ModuleNotFoundError: No module | 'deepspeed'"}
        block = page.cell_block(results.Results([*some(), failed]), CELL)
        row = next(text for text in block.splitlines() if "DeepSpeed" in text)
        self.assertIn("| fails: ModuleNotFoundError: No module \\| 'deepspeed' |", row)
        header = next(text for text in block.splitlines() if text.startswith("| system"))
        self.assertEqual(row.replace("\\|", "").count("|"), header.count("|"))

    def test_one_failed_repeat_leaves_the_others(self):
        failed = {"cell": CELL.name, "system": "ragged", "error": "RuntimeError: no"}
        self.assertEqual(self.rows([*some(), failed])["ragged"].error, "")

    def test_weaknesses_are_said(self):
        block = page.cell_block(results.Results(some()), CELL)
        self.assertIn("Not run here: one process, C++, DDP, FSDP1, DeepSpeed", block)
        said = next(text for text in block.splitlines() if text.startswith("Another sharding system"))
        self.assertEqual(said.split(": ", 1)[1], "RaggedFSDP: collectives (FSDP2); their bytes (FSDP2).")

    def test_a_run_with_another_loss_does_not_count(self):
        lines = some()
        lines[-1]["loss_difference"] = 2e-6
        self.assertIn("| RaggedFSDP (doesn't count: loss) |", page.cell_block(results.Results(lines), CELL))
        found = [each for each in targets(results.Results(lines), []) if each.system == "ragged"]
        self.assertTrue(found and all(each.met is None for each in found))

    def test_targets(self):
        found = {(each.what, each.system): each for each in targets(results.Results(some()), [])}
        copies = found["written by copies, P: llama-fp32-2", "ragged"]
        self.assertEqual((copies.rival, copies.measured, copies.met), ("4.00", "1.00", True))
        peak = found["peak live bytes, MiB: llama-fp32-2", "ragged"]
        self.assertEqual((peak.measured, peak.met), ("30.0, 0.75 of it", True))
        self.assertIsNone(found["wall ms a step: llama-fp32-4", "ragged"].met)

    def test_a_target_against_all_peers_names_the_one_that_is_ahead(self):
        lines = [*some(), line("fsdp1", peak_bytes=25 * MIB)]
        found = {(each.what, each.system): each for each in targets(results.Results(lines), [])}
        peak = found["peak live bytes, MiB: llama-fp32-2", "ragged"]
        self.assertEqual((peak.measured, peak.met), ("30.0, 0.75 of it; FSDP1 25.0", False))

    def test_a_busy_machine_is_said(self):
        self.assertIn("Other programs used 0.1 to 0.1 of 2 cores", page.conditions_block(results.Results(some())))
        lines = some()
        lines[-1]["other_cores"] = 1.4
        self.assertIn("**The machine was busy", page.conditions_block(results.Results(lines)))

    def test_figures_are_xml_with_a_line_a_system(self):
        rows = self.rows(some())
        root = xml.etree.ElementTree.fromstring(figures.bars("a title", rows, P))
        texts = [element.text for element in root.iter() if element.tag.endswith("text")]
        for name in rows:
            self.assertEqual(texts.count(SYSTEMS[name].label), 1)

    def test_dry_runs(self):
        found = {"shard_s": 0.8, "first_step_s": 0.1, "us_a_unit": 500.0, "update_ms": 1.0, "collectives": 10,
                 "payload": P, "copied": P, "padding": 0.25, "peak_bytes": P, "bytes_at_rest": P}  # fmt: skip
        lines = [{"model": "tiny", "world": 1024, "systems": {"fsdp2": found, "ragged": found | {"shard_s": 0.03}}},
                 {"model": "moe", "world": 4096, "error": "MemoryError: no"}]  # fmt: skip
        block = page.dry_block(lines)
        self.assertIn("| tiny | 1,024 | FSDP2 | 0.800 |", block)
        self.assertIn("fails: MemoryError", block)
        met = next(each for each in targets(results.Results(some()), lines) if "1,024" in each.what)
        self.assertEqual((met.rival, met.measured, met.met), ("0.80", "0.030", True))

    def test_the_page_is_that_of_the_lines_kept(self):
        done = subprocess.run(
            [sys.executable, "-m", "bench.peers.page", "--check"], cwd=REPO, capture_output=True, text=True,
            env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"})  # fmt: skip
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_every_cell_is_on_the_page(self):
        words = re.findall(r"<!-- refresh: peers (.+?) -->", (REPO / "docs" / "peers.md").read_text())
        for name in CELLS:
            self.assertIn(name, words)

    def test_lines_kept_name_no_machine(self):
        for name in ("results.jsonl", "dry_runs.jsonl"):
            for text in (REPO / "bench" / "peers" / name).read_text().splitlines():
                self.assertNotRegex(text, r"/(home|root|work|tmp)/")
                json.loads(text)


if __name__ == "__main__":
    unittest.main()
