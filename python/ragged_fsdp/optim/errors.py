"""How optimizers say that something is wrong: the operation, what was expected, what came, the parameter, the
remedy."""

from __future__ import annotations

from typing import NoReturn

from ragged_fsdp import _C


def refuse(operation: str, expected: str, got: object, remedy: str, name: str = "") -> NoReturn:
    """Raises InvalidArgument: `[operation] Expected X, but got Y (param 'n'). What to do.`"""
    where = f" (param '{name}')" if name else ""
    raise _C.InvalidArgument(f"[{operation}] Expected {expected}, but got {got}{where}. {remedy}")
