"""Saving: each rank writes its own parts, the first rank publishes once all have. Files and their order are C++
(ragged/checkpoint/saver.h); here is what a user calls.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import threading
import weakref
from typing import Any

import torch.distributed as dist

from ragged_fsdp import _C
from ragged_fsdp.checkpoint.contents import Model, Optimizers, contents, to_json
from ragged_fsdp.checkpoint.groups import Ranks
from ragged_fsdp.checkpoint.parts import Parts

EXTRA = "extra"
Folder = str | os.PathLike[str]


@dataclasses.dataclass(frozen=True)
class Saved:
    """A checkpoint that was published. bytes: of tensors, all ranks together; seconds: from the call until then;
    blocked_seconds: of these, what the caller waited."""

    step: int
    folder: pathlib.Path
    bytes: int
    seconds: float
    blocked_seconds: float


class PendingSave:
    """A checkpoint that is being written by a thread of each rank."""

    def __init__(self, owner: Checkpointer, step: int) -> None:
        self.step = step
        self._owner: Checkpointer | None = owner
        self._saved: Saved | None = None
        self._error: Exception | None = None

    def done(self) -> bool:
        """Whether this rank has nothing left to write. Not collective; other ranks may still write."""
        return self._owner is None or self._owner._saver.is_written

    def progress(self) -> tuple[int, int, float]:
        """(bytes that this rank has written, bytes that it will have, seconds since the call)."""
        return self._owner._saver.progress() if self._owner else (0, 0, 0.0)

    def result(self) -> Saved:
        """Waits for all ranks and publishes. Collective, the first time. Raises what went wrong on any of them, again
        at each call."""
        if self._owner is not None:
            self._owner._finish(self)
        if self._error is not None:
            raise self._error
        assert self._saved is not None
        return self._saved


class Checkpointer:
    """The checkpoints of a run below `root`: step-<n>/ each, and `latest`, which names the one published last.

    keep: the newest that stay; 0 keeps all.
    timeout: seconds that a rank may take to write its files. Past it the checkpoint is given up on all ranks. Not the
        group's own time-out: ranks that wait meet every fraction of a second.
    process_group: whose ranks save together, the default group if None. All ranks must see one file system.

    Calls are collective and come in the same order on all ranks, from one thread. What fails on one rank raises the
    same on all: CheckpointError, or InvalidArgument for what can't be saved; checkpoints before it are untouched.
    Temporary folders below `root` that a killed run left are removed at construction, so one run at a time may have it.
    """

    def __init__(
        self,
        root: Folder,
        *,
        keep: int = 2,
        timeout: float = 1800.0,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.root = pathlib.Path(root)
        self.keep = keep
        self.timeout = timeout
        self._ranks = Ranks.of(process_group)
        self._saver = _C.CheckpointSaver(self._ranks.all, str(self.root))
        # Of what is being written; weak, so that an object which nobody finishes ends where its last name does, not when
        # the collector comes by: its threads and its group must not outlive it.
        self._pending: weakref.ref[PendingSave] | None = None
        self._step = -1

    def save(
        self, model: Model, optimizer: Optimizers = None, *, step: int, extra: Any = None, rank_extra: Any = None
    ) -> Saved:
        """Writes and publishes. Nothing is copied but what isn't contiguous, one tensor at a time.

        model: a module, or tensors by name. optimizer: one, several or none, over the module's parameters.
        extra: JSON, the same on all ranks: a scheduler's state, the position in the data. rank_extra: JSON of this
            rank alone, such as rng_state(). Tuples come back as lists, keys as texts.
        """
        return self._start(model, optimizer, step, extra, rank_extra, is_async=False).result()

    def async_save(
        self, model: Model, optimizer: Optimizers = None, *, step: int, extra: Any = None, rank_extra: Any = None
    ) -> PendingSave:
        """Copies what this rank writes, returns, and writes in a thread, which issues no collective. Waits first for
        the save before, whose error, if any, is raised here and nothing begun. Published by the next call of this
        object, or by result()."""
        return self._start(model, optimizer, step, extra, rank_extra, is_async=True)

    def finish(self) -> Saved | None:
        """Publishes what is being written, if anything is; the end of a run. Raises what went wrong. Collective."""
        if self._pending is None:
            return None
        return (self._pending() or PendingSave(self, self._step)).result()

    def _start(
        self, model: Model, optimizer: Optimizers, step: int, extra: Any, rank_extra: Any, is_async: bool
    ) -> PendingSave:
        self.finish()

        def prepare() -> tuple[Parts, dict[str, str], dict[str, int], dict[str, str]]:
            saved = contents(model, optimizer)
            saved.integers["step"] = step
            texts = {} if extra is None else {EXTRA: to_json(extra, "extra")}
            own = {} if rank_extra is None else {EXTRA: to_json(rank_extra, "rank_extra")}
            return Parts(saved.entries, self._ranks, "save"), saved.texts | texts, saved.integers, own

        parts, texts, integers, own = self._ranks.agreed(prepare)
        self._saver.start(step, parts.parts, texts, integers, own, self.keep, is_async, self.timeout)
        pending = PendingSave(self, step)
        self._pending, self._step = weakref.ref(pending), step
        return pending

    def _finish(self, pending: PendingSave) -> None:
        self._pending = pending._owner = None
        try:
            report = self._saver.finish()
            pending._saved = Saved(**{**report, "folder": pathlib.Path(report["folder"])})
        except Exception as error:
            pending._error = error


class _Key:
    """Stands for the default group where there is none."""


_alone = _Key()
# One object a root and process group, so that calls of the functions below know of each other. Keyed by the group
# object, never by its name: ranks may be threads of one process.
_checkpointers: weakref.WeakKeyDictionary[Any, dict[str, Checkpointer]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def checkpointer_of(root: Folder, process_group: dist.ProcessGroup | None) -> Checkpointer | None:
    """The one that save() or async_save() made for this root."""
    group = (process_group or dist.group.WORLD) if dist.is_initialized() else None
    with _lock:
        return _checkpointers.get(group or _alone, {}).get(os.path.abspath(root))


def _checkpointer(root: Folder, keep: int, timeout: float, process_group: dist.ProcessGroup | None) -> Checkpointer:
    known = checkpointer_of(root, process_group)
    if known is None:
        known = Checkpointer(root, process_group=process_group)
        group = (process_group or dist.group.WORLD) if dist.is_initialized() else None
        with _lock:
            _checkpointers.setdefault(group or _alone, {})[os.path.abspath(root)] = known
    known.keep, known.timeout = keep, timeout
    return known


def save(
    root: Folder,
    model: Model,
    optimizer: Optimizers = None,
    *,
    step: int,
    extra: Any = None,
    rank_extra: Any = None,
    keep: int = 2,
    timeout: float = 1800.0,
    process_group: dist.ProcessGroup | None = None,
) -> Saved:
    """Checkpointer(root, ..).save(..): writes `root`/step-<step> and lets `latest` name it."""
    owner = _checkpointer(root, keep, timeout, process_group)
    return owner.save(model, optimizer, step=step, extra=extra, rank_extra=rank_extra)


def async_save(
    root: Folder,
    model: Model,
    optimizer: Optimizers = None,
    *,
    step: int,
    extra: Any = None,
    rank_extra: Any = None,
    keep: int = 2,
    timeout: float = 1800.0,
    process_group: dist.ProcessGroup | None = None,
) -> PendingSave:
    """Checkpointer(root, ..).async_save(..). A later save, async_save or load of this root publishes it or raises its
    error; call result() after the last one."""
    owner = _checkpointer(root, keep, timeout, process_group)
    return owner.async_save(model, optimizer, step=step, extra=extra, rank_extra=rank_extra)
