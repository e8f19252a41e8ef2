"""Which torch this package runs with: checked before the extension is loaded, since a wrong one would fail with a linker's message."""

from __future__ import annotations

import importlib.util
import pathlib
import re

import torch

OLDEST, NEWEST = (2, 12), (2, 15)


def version_tuple(version: str) -> tuple[int, int]:
    """(major, minor) of "2.15.0+cpu"."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        raise ImportError(f"[import] Expected a version of torch, but got {version!r}.")
    return int(found[1]), int(found[2])


def check_torch() -> None:
    """Raises ImportError for a torch that is too old or too new, or not the one that the extension was built with."""
    running = version_tuple(torch.__version__)
    if not OLDEST <= running <= NEWEST:
        raise ImportError(
            f"[import] Expected torch {'.'.join(map(str, OLDEST))} to {'.'.join(map(str, NEWEST))}, but got {torch.__version__}. Before 2.12 a "
            "subclass of DTensor never sees its own operations."
        )
    built = _built_with()
    if built is not None and version_tuple(built) != running:
        raise ImportError(
            f"[import] Expected torch {built}, which ragged_fsdp was built with, but got {torch.__version__}. Build it against this one: "
            "pip install --no-build-isolation --force-reinstall --no-deps ragged_fsdp"
        )


def _built_with() -> str | None:
    """Written next to the extension by its build."""
    spec = importlib.util.find_spec("ragged_fsdp")
    for folder in (spec.submodule_search_locations if spec is not None else None) or ():
        path = pathlib.Path(folder) / "built_with_torch.txt"
        if path.is_file():
            return path.read_text().strip()
    return None
