#!/usr/bin/env python3
"""Checks who may include what; `ctest -R layers` runs it, `make lint` too.

    tools/check_layers.py [ROOT]

Rules, in the order of the functions below:
  arrows      an include of "ragged/<layer>/..." goes along MAY_USE and along the layer's DEPENDS in CMake
  cycles      no header includes itself by a detour
  torch-free  base, layout, plan and sim see no torch header
  heavy       expensive or delicate headers stay where HEAVY says, so that a file's compile time is no surprise
  length      no source file over 500 lines, unless its opening comment says "Long because ..."

Only the text is read: an #include under an #if counts, one in a comment doesn't.
"""

import dataclasses
import pathlib
import re
import sys

BELOW_SIM = ["base", "layout", "plan"]
BELOW_OPTIM = [*BELOW_SIM, "comm", "buffer", "fsdp"]
MAY_USE = {
    "base": [],
    "layout": ["base"],
    "plan": ["base", "layout"],
    "sim": BELOW_SIM,
    "comm": BELOW_SIM,
    "buffer": [*BELOW_SIM, "comm"],
    "fsdp": [*BELOW_SIM, "comm", "buffer"],
    "optim": BELOW_OPTIM,
    "checkpoint": BELOW_OPTIM,
    "train": [*BELOW_OPTIM, "optim", "checkpoint"],
}
TORCH_FREE = ["base", "layout", "plan", "sim"]
TOP = ["cli", "tests", "bench", "python"]  # may use every layer
MAX_LINES = 500


@dataclasses.dataclass(frozen=True)
class Heavy:
    """A group of headers and the files that may include them."""

    what: str
    header: str  # regular expression, matched at the start of what stands between the angle brackets
    allowed: str  # regular expression for the whole path of the including file
    where: str  # the same in words
    one_file: bool = False


HEAVY = [
    Heavy("torch/torch.h", r"torch/(torch|all)\.h$", r"(tests|bench)/.*|ragged/train/.*\.cpp",
          "tests, bench and .cpp files of ragged/train"),
    Heavy("torch/nn", r"torch/nn(/|\.h)", r"(tests|bench|ragged/fsdp|ragged/train)/.*",
          "ragged/fsdp, ragged/train, tests and bench"),
    Heavy("CLI11", r"CLI/", r"cli/.*\.cpp", "one .cpp file of cli", one_file=True),
    Heavy("toml++", r"toml\+\+/", r"ragged/train/.*\.cpp", "one .cpp file of ragged/train", one_file=True),
    Heavy("nlohmann/json.hpp", r"nlohmann/json\.hpp$", r".*\.cpp",
          ".cpp files (headers take nlohmann/json_fwd.hpp)"),
    Heavy("Gloo's process group", r"gloo/|torch/csrc/distributed/c10d/(gloo/|ProcessGroupGloo)",
          r"ragged/comm/.*\.cpp", "one .cpp file of ragged/comm", one_file=True),
    Heavy("NCCL's process group", r"nccl\.h$|torch/csrc/distributed/c10d/(nccl2?/|ProcessGroupNCCL|NCCLUtils)",
          r"ragged/comm/.*\.cpp", "one .cpp file of ragged/comm", one_file=True),
]

INCLUDE = re.compile(r'\s*#\s*include\s*(?:<([^>]+)>|"([^"]+)")')
BLOCK_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Include:
    line: int
    target: str
    quoted: bool


class Tree:
    """The source files below a root: their text and their includes, read once."""

    def __init__(self, root):
        self.root = pathlib.Path(root)
        self.text = {}
        for top in ["ragged", *TOP]:
            for path in sorted((self.root / top).rglob("*")):
                if path.suffix in (".h", ".hpp", ".cpp", ".cu", ".cuh") and path.is_file():
                    self.text[path.relative_to(self.root).as_posix()] = path.read_text(errors="replace")
        self.includes = {path: list(self._includes(text)) for path, text in self.text.items()}

    @staticmethod
    def _includes(text):
        # A removed comment leaves its line breaks, so that line numbers stay.
        text = BLOCK_COMMENT.sub(lambda comment: "\n" * comment[0].count("\n"), text)
        for number, line in enumerate(text.splitlines(), 1):
            if match := INCLUDE.match(line):
                yield Include(number, match[1] or match[2], quoted=match[2] is not None)

    def layer_depends(self, layer):
        """The DEPENDS of ragged_add_layer(layer ...), or None where the folder has no CMakeLists.txt yet."""
        path = self.root / "ragged" / layer / "CMakeLists.txt"
        if not path.is_file():
            return None
        text = re.sub(r"#.*", "", path.read_text())
        call = re.search(rf"ragged_add_layer\s*\(\s*{layer}\b([^)]*)\)", text)
        depends, taking = [], False
        for word in call[1].split() if call else []:
            if word.isupper():
                taking = word == "DEPENDS"
            elif taking:
                depends.append(word)
        return depends


def layer_of(path):
    """'plan' for ragged/plan/planner.h, '' for ragged/x.h, None for anything that isn't below ragged/."""
    parts = path.split("/")
    if parts[0] != "ragged" or len(parts) < 2:
        return None
    return parts[1] if len(parts) > 2 else ""


def check_arrows(tree):
    problems = []
    layers = sorted({layer_of(path) for path in tree.text} - {None})
    for layer in layers:
        if layer not in MAY_USE:
            problems.append(f"ragged/{layer or '*.h'}: Expected a layer that tools/check_layers.py knows, "
                            f"but got '{layer}'. Add it to MAY_USE, or move the file.")
    linked = {layer: tree.layer_depends(layer) for layer in MAY_USE}
    for layer, depends in linked.items():
        for other in depends or []:
            if other not in MAY_USE[layer]:
                problems.append(f"ragged/{layer}/CMakeLists.txt: {layer} may not depend on {other}; "
                                f"it may use {', '.join(MAY_USE[layer]) or 'no layer'}.")

    def reachable(layer):
        found, todo = set(), [layer]
        while todo:
            for other in linked.get(todo.pop()) or []:
                if other not in found:
                    found.add(other)
                    todo.append(other)
        return found

    for path, includes in tree.includes.items():
        layer = layer_of(path)
        if layer not in MAY_USE:
            continue
        for include in includes:
            other = layer_of(include.target)
            at = f"{path}:{include.line}:"
            if other is None:
                if include.quoted:
                    problems.append(f'{at} "{include.target}" hides its layer; write "ragged/<layer>/...", '
                                    "or <...> for what isn't ours.")
            elif other == layer:
                pass
            elif other not in MAY_USE[layer]:
                problems.append(f"{at} {layer} may not use {other}; "
                                f"it may use {', '.join(MAY_USE[layer]) or 'no layer'}.")
            elif linked[layer] is not None and other not in reachable(layer):
                problems.append(f"{at} {layer} uses {other}, but the DEPENDS in ragged/{layer}/CMakeLists.txt "
                                "don't lead there.")
    return problems


def check_cycles(tree):
    problems, done = [], set()

    def visit(path, trail):
        if path in trail:
            circle = trail[trail.index(path):] + [path]
            problems.append(f"{path}: includes itself: {' -> '.join(circle)}")
            return
        if path in done:
            return
        for include in tree.includes[path]:
            if include.target in tree.includes:
                visit(include.target, [*trail, path])
        done.add(path)

    for path in tree.includes:
        visit(path, [])
    return problems


def check_torch_free(tree):
    return [f"{path}:{include.line}: {layer_of(path)} is free of torch, but includes {include.target}."
            for path, includes in tree.includes.items() if layer_of(path) in TORCH_FREE
            for include in includes if re.match(r"(ATen|torch|c10|caffe2)/", include.target)]


def check_heavy(tree):
    problems = []
    for rule in HEAVY:
        users = []
        for path, includes in tree.includes.items():
            hits = [include for include in includes if re.match(rule.header, include.target)]
            if hits and not re.fullmatch(rule.allowed, path):
                problems.append(f"{path}:{hits[0].line}: {hits[0].target} ({rule.what}) belongs in {rule.where}.")
            elif hits:
                users.append(path)
        if rule.one_file and len(users) > 1:
            problems.append(f"{users[1]}: {rule.what} belongs in {rule.where}, but is in {', '.join(users)}.")
    return problems


def opening_comment(text):
    comment = []
    for line in text.splitlines():
        line = line.strip()
        if line.startswith(("//", "/*", "*")):
            comment.append(line.lstrip("/* "))
        elif comment or (line and line != "#pragma once"):
            break
    return " ".join(comment)


def check_length(tree):
    problems = []
    for path, text in tree.text.items():
        lines = text.count("\n")
        if path.startswith(("ragged/", "cli/")) and lines > MAX_LINES and "Long because" not in opening_comment(text):
            problems.append(f"{path}: Expected at most {MAX_LINES} lines, but got {lines}. "
                            "Split it, or say 'Long because ...' in its opening comment.")
    return problems


def check(root):
    """All problems of the tree, as lines of text."""
    tree = Tree(root)
    if not tree.text:
        return [f"{root}: Expected source files under ragged/, but found none."]
    return [problem for rule in (check_arrows, check_cycles, check_torch_free, check_heavy, check_length)
            for problem in rule(tree)]


def main():
    root = sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent.parent
    problems = check(root)
    print("\n".join(problems) or "check_layers: no problem")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
