"""Feeds tools/check_layers.py small bad trees and sees each rule fire, and only where it should."""

import pathlib
import subprocess
import sys
import tempfile
import unittest

REPO = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO / "tools"))
import check_layers  # noqa: E402

CMAKE = "ragged_add_layer({layer} TORCH SOURCES a.cpp b.cpp DEPENDS {depends} LINK CLI11::CLI11)"


class CheckLayersTest(unittest.TestCase):
    def problems(self, files):
        """The problems of a tree that holds these files."""
        with tempfile.TemporaryDirectory() as root:
            for name, text in files.items():
                path = pathlib.Path(root, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            return check_layers.check(root)

    def assert_good(self, files):
        self.assertEqual(self.problems(files), [])

    def assert_bad(self, files, *fragments):
        problems = self.problems(files)
        self.assertEqual(len(problems), len(fragments), problems)
        for fragment, problem in zip(fragments, problems):
            self.assertIn(fragment, problem)

    # --- arrows

    def test_arrows_down_are_good(self):
        self.assert_good({
            "ragged/base/a.h": "#include <vector>\n",
            "ragged/layout/a.h": '#include "ragged/base/a.h"\n#include "ragged/layout/b.h"\n',
            "ragged/layout/b.h": "",
            "ragged/comm/a.cpp": '#include "ragged/plan/a.h"\n#include <ATen/ATen.h>\n',
            "ragged/train/a.cpp": '#include "ragged/optim/a.h"\n#include "ragged/checkpoint/a.h"\n',
            "cli/main.cpp": '#include "ragged/train/a.h"\n#include "ragged/sim/a.h"\n#include "cli/other.h"\n',
            "tests/plan/a_test.cpp": '#include "ragged/train/a.h"\n#include "tests/support/ranks.h"\n',
        })

    def test_every_pair_of_layers_goes_one_way(self):
        for lower in check_layers.MAY_USE:
            for upper, may_use in check_layers.MAY_USE.items():
                with self.subTest(lower=lower, upper=upper):
                    include = {f"ragged/{lower}/a.h": f'#include "ragged/{upper}/b.h"\n'}
                    if upper == lower or upper in check_layers.MAY_USE[lower]:
                        self.assert_good(include)
                        self.assertNotIn(lower, may_use if upper != lower else [])
                    else:
                        self.assert_bad(include, f"ragged/{lower}/a.h:1: {lower} may not use {upper}")

    def test_the_table_of_the_design(self):
        self.assertEqual(check_layers.MAY_USE["base"], [])
        self.assertEqual(check_layers.MAY_USE["plan"], ["base", "layout"])
        self.assertNotIn("sim", check_layers.MAY_USE["comm"])
        self.assertNotIn("fsdp", check_layers.MAY_USE["buffer"])
        self.assertNotIn("optim", check_layers.MAY_USE["checkpoint"])
        self.assertNotIn("checkpoint", check_layers.MAY_USE["optim"])

    def test_arrow_in_angle_brackets_counts(self):
        self.assert_bad({"ragged/base/a.h": "\n#  include <ragged/plan/b.h>\n"},
                        "ragged/base/a.h:2: base may not use plan; it may use no layer.")

    def test_include_in_a_comment_does_not_count(self):
        self.assert_good({"ragged/base/a.h": '// #include "ragged/plan/b.h"\n/*\n#include "ragged/plan/b.h"\n*/\n'})

    def test_block_comment_keeps_line_numbers(self):
        self.assert_bad({"ragged/base/a.h": '/*\n\n*/\n#include "ragged/plan/b.h"\n'}, "a.h:4:")

    def test_relative_include_hides_its_layer(self):
        self.assert_bad({"ragged/base/a.h": '#include "../plan/b.h"\n'}, "hides its layer")

    def test_unknown_layer(self):
        self.assert_bad({"ragged/net/a.h": ""}, "but got 'net'")
        self.assert_bad({"ragged/all.h": ""}, "Expected a layer")

    def test_depends_against_the_arrow(self):
        self.assert_bad({
            "ragged/layout/CMakeLists.txt": CMAKE.format(layer="layout", depends="base plan"),
            "ragged/layout/a.cpp": "",
        }, "ragged/layout/CMakeLists.txt: layout may not depend on plan")

    def test_include_that_no_depends_leads_to(self):
        tree = {
            "ragged/buffer/CMakeLists.txt": CMAKE.format(layer="buffer", depends="plan"),
            "ragged/plan/CMakeLists.txt": CMAKE.format(layer="plan", depends="base\n  # not layout\n "),
            "ragged/buffer/a.cpp": '#include "ragged/base/a.h"\n#include "ragged/comm/a.h"\n',
        }
        self.assert_bad(tree, "ragged/buffer/a.cpp:2: buffer uses comm, but the DEPENDS")

    # --- cycles

    def test_cycle_within_a_layer(self):
        self.assert_bad({
            "ragged/base/a.h": '#include "ragged/base/b.h"\n',
            "ragged/base/b.h": '#include "ragged/base/c.h"\n',
            "ragged/base/c.h": '#include "ragged/base/a.h"\n',
            "ragged/base/d.h": '#include "ragged/base/a.h"\n',
        }, "ragged/base/a.h -> ragged/base/b.h -> ragged/base/c.h -> ragged/base/a.h")

    def test_two_ways_to_one_header_are_no_cycle(self):
        self.assert_good({
            "ragged/base/a.h": '#include "ragged/base/b.h"\n#include "ragged/base/c.h"\n',
            "ragged/base/b.h": '#include "ragged/base/c.h"\n',
            "ragged/base/c.h": "",
        })

    # --- torch-free

    def test_torch_in_a_torch_free_layer(self):
        for layer in ("base", "layout", "plan", "sim"):
            for header in ("ATen/core/Tensor.h", "torch/version.h", "c10/util/Exception.h"):
                with self.subTest(layer=layer, header=header):
                    self.assert_bad({f"ragged/{layer}/a.cpp": f"#include <{header}>\n"}, "is free of torch")

    # --- heavy

    def test_torch_torch_h(self):
        line = "#include <torch/torch.h>\n"
        self.assert_good({"tests/fsdp/a.cpp": line, "bench/a.cpp": line, "ragged/train/a.cpp": line})
        for path in ("ragged/train/a.h", "ragged/fsdp/a.cpp", "cli/a.cpp", "python/bindings/a.cpp"):
            with self.subTest(path=path):
                problems = self.problems({path: line, "ragged/base/a.h": ""})
                self.assertEqual(problems, [f"{path}:1: torch/torch.h (torch/torch.h) belongs in "
                                            "tests, bench and .cpp files of ragged/train."])

    def test_torch_nn(self):
        line = "#include <torch/nn/module.h>\n"
        self.assert_good({"ragged/fsdp/a.h": line, "ragged/train/a.h": line, "tests/a.cpp": line, "bench/a.cpp": line})
        self.assert_bad({"ragged/optim/a.cpp": line}, "torch/nn/module.h")
        self.assert_bad({"ragged/optim/a.cpp": "#include <torch/nn.h>\n"}, "torch/nn.h")

    def test_cli11(self):
        line = "#include <CLI/CLI.hpp>\n"
        self.assert_good({"cli/main.cpp": line})
        self.assert_bad({"cli/main.h": line}, "one .cpp file of cli")
        self.assert_bad({"ragged/train/a.cpp": line}, "one .cpp file of cli")
        self.assert_bad({"cli/main.cpp": line, "cli/train.cpp": line}, "cli/train.cpp: CLI11 belongs in one")

    def test_toml(self):
        line = "#include <toml++/toml.h>\n"
        self.assert_good({"ragged/train/a.cpp": line})
        self.assert_bad({"ragged/train/a.h": line}, "toml++")
        self.assert_bad({"tests/train/a.cpp": line}, "toml++")
        self.assert_bad({"ragged/train/a.cpp": line, "ragged/train/b.cpp": line}, "ragged/train/b.cpp: toml++")

    def test_json(self):
        self.assert_good({"ragged/plan/a.cpp": "#include <nlohmann/json.hpp>\n", "tests/plan/a.cpp":
                          "#include <nlohmann/json.hpp>\n", "ragged/plan/a.h": "#include <nlohmann/json_fwd.hpp>\n"})
        self.assert_bad({"ragged/plan/a.h": "#include <nlohmann/json.hpp>\n"}, "nlohmann/json.hpp")

    def test_process_groups(self):
        for header in ("torch/csrc/distributed/c10d/ProcessGroupGloo.hpp", "gloo/context.h",
                       "torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"):
            line = f"#include <{header}>\n"
            with self.subTest(header=header):
                self.assert_good({"ragged/comm/a.cpp": line})
                self.assert_bad({"ragged/comm/a.h": line}, header)
                self.assert_bad({"ragged/fsdp/a.cpp": line}, header)
                self.assert_bad({"tests/comm/a.cpp": line}, header)
                self.assert_bad({"ragged/comm/a.cpp": line, "ragged/comm/b.cpp": line}, "ragged/comm/b.cpp:")

    # --- length

    def test_length(self):
        long = "int a;\n" * 501
        self.assert_good({"ragged/base/a.cpp": "int a;\n" * 500, "tests/a_test.cpp": long})
        self.assert_bad({"ragged/base/a.cpp": long}, "Expected at most 500 lines, but got 501")
        self.assert_bad({"cli/a.cpp": long}, "Expected at most 500 lines")
        self.assert_good({"ragged/base/a.h": "#pragma once\n// Things.\n// Long because a table is one.\n" + long})
        self.assert_bad({"ragged/base/a.h": "int b;\n// Long because it is too late to say so here.\n" + long},
                        "Expected at most 500 lines")

    # --- the command

    def test_command(self):
        script = str(REPO / "tools" / "check_layers.py")
        with tempfile.TemporaryDirectory() as root:
            run = subprocess.run([sys.executable, script, root], capture_output=True, text=True)
            self.assertEqual(run.returncode, 1)
            self.assertIn("found none", run.stdout)
            path = pathlib.Path(root, "ragged/base/a.h")
            path.parent.mkdir(parents=True)
            path.write_text("")
            run = subprocess.run([sys.executable, script, root], capture_output=True, text=True)
            self.assertEqual((run.returncode, run.stdout), (0, "check_layers: no problem\n"))


if __name__ == "__main__":
    unittest.main()
