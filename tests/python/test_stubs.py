"""The type stub of the extension lists what the extension has, no more and no less."""

import ast
import pathlib
import re

import ragged_fsdp
from ragged_fsdp import _C

STUB = pathlib.Path(ragged_fsdp.__file__).with_name("_C.pyi")


def declared(body):
    """Public names of a stub's module or class body, and the constructor where there is one."""
    names = set()
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign):
            names.add(node.target.id)
    return {name for name in names if not name.startswith("_") or name == "__init__"}


def public(names):
    return {name for name in names if not name.startswith("_")}


def test_the_stub_lists_what_the_extension_has():
    tree = ast.parse(STUB.read_text())
    assert declared(tree.body) == public(dir(_C))
    for node in tree.body:
        if not isinstance(node, ast.ClassDef):
            continue
        cls = getattr(_C, node.name)
        if issubclass(cls, BaseException):
            continue
        assert declared(node.body) - {"__init__"} == public(vars(cls)), node.name


def test_the_stub_has_the_constructors_arguments():
    # pybind11 writes the signature into the docstring.
    for node in ast.parse(STUB.read_text()).body:
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef) and inner.name == "__init__":
                    documented = getattr(_C, node.name).__init__.__doc__
                    # "name: type" or "name: type = default" after "(" or ", ".
                    names = re.findall(r"[(,] ?(\w+): ", documented)
                    assert [argument.arg for argument in inner.args.args] == names, (node.name, documented)
