"""Models of others, as Hugging Face has them: a folder with model.safetensors, or several files and an index. Weights
stream from the files into shards and back, so that no rank holds more than a tensor of the model.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ragged_fsdp import _C
from ragged_fsdp.checkpoint.contents import named_tensors
from ragged_fsdp.checkpoint.groups import Ranks
from ragged_fsdp.checkpoint.parts import Entry, Parts
from ragged_fsdp.checkpoint.saving import Folder

Rename = Callable[[str], str]

# safetensors' names of what a weight may come as.
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_CASTABLE = {torch.float64, torch.float32, torch.bfloat16, torch.float16}  # 8 bits and integers may be codes


def load_safetensors(
    model: nn.Module,
    folder: Folder,
    *,
    rename: Rename | None = None,
    allow_missing: bool = False,
    allow_unused: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Fills the parameters and persistent buffers of a model, sharded or not, from a folder of safetensors. Each rank
    reads the elements that it holds, a few megabytes at a time; floating-point numbers are cast to the parameter's
    dtype. A model from the meta device needs memory first, `model.to_empty(device=..)`, and its other buffers their
    values.

    rename: from a name in the model to the one in the files; a tied tensor is looked for under each of its names.
    allow_missing: tensors of the model that the folder lacks stay as they are. allow_unused: tensors in the folder that
        the model has no use for.

    Raises CheckpointError, the same on all ranks and before anything is changed, for what is missing, truncated,
    quantised or of another shape; such files have no checksums. Collective.
    """
    ranks = Ranks.of(process_group)
    files, wanted = ranks.agreed(lambda: _plan_load(model, folder, rename, allow_missing, allow_unused))
    parts = ranks.agreed(lambda: Parts([entry for entry, _ in wanted], ranks, "load_safetensors"))

    def read() -> None:
        for part, (entry, dtype) in zip(parts.parts, wanted, strict=True):
            files.read(entry.name, dtype, part)
        parts.copy_back()

    ranks.agreed(read)


def _plan_load(
    model: nn.Module, folder: Folder, rename: Rename | None, allow_missing: bool, allow_unused: bool
) -> tuple[_C.ModelFiles, list[tuple[Entry, torch.dtype]]]:
    files = _C.ModelFiles(str(folder))
    wanted: dict[int, tuple[Entry, torch.dtype]] = {}
    missing: dict[int, str] = {}
    used = set()
    for name, tensor in named_tensors(model).items():
        stored_name = rename(name) if rename else name
        found = files.describe(stored_name)
        if found is None:
            missing.setdefault(id(tensor), stored_name)
            continue
        used.add(stored_name)
        dtype, shape = found
        if shape != tuple(tensor.shape) or dtype not in _DTYPES:
            raise _C.CheckpointError(
                f"[load_safetensors] Expected tensor '{stored_name}' of shape {tuple(tensor.shape)} in a dtype of "
                f"torch's, but '{folder}' has {shape} in {dtype}. Build the model with the folder's configuration."
            )
        stored = _DTYPES[dtype]
        if stored != tensor.dtype and not {stored, tensor.dtype} <= _CASTABLE:
            raise _C.CheckpointError(
                f"[load_safetensors] Expected tensor '{stored_name}' in a dtype that casts to {tensor.dtype}, but "
                f"'{folder}' has {dtype}. Quantised weights need their scales: dequantise them first."
            )
        wanted.setdefault(id(tensor), (Entry(stored_name, tensor), stored))
    lacking = [name for key, name in missing.items() if key not in wanted]
    if lacking and not allow_missing:
        raise _C.CheckpointError(
            f"[load_safetensors] Expected tensor '{lacking[0]}', but '{folder}' has none of that name ({len(lacking)} "
            "are missing). Map the model's names with rename=, or pass allow_missing=True."
        )
    unused = sorted(set(files.names()) - used)
    if unused and not allow_unused:
        raise _C.CheckpointError(
            f"[load_safetensors] Expected a use for tensor '{unused[0]}' of '{folder}', but the model has none of that "
            f"name ({len(unused)} are unused). Map the model's names with rename=, or pass allow_unused=True."
        )
    return files, list(wanted.values())


def save_safetensors(
    model: nn.Module,
    folder: Folder,
    *,
    rename: Rename | None = None,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = 5_000_000_000,
    process_group: dist.ProcessGroup | None = None,
) -> list[pathlib.Path]:
    """Writes parameters and persistent buffers as others read them, into a new folder, which appears whole or not at
    all. Tensors are gathered one after the other, and the first rank writes; tied ones once, under their first name.
    Config and tokenizer are the caller's.

    rename: from a name in the model to the one in the files. dtype: floating-point tensors are cast to it.
    max_file_bytes: larger models become several files and an index.

    Returns the paths of the files. Raises CheckpointError, the same on all ranks, where the folder exists with
    something in it, or can't be written. Collective.
    """
    ranks = Ranks.of(process_group)
    tensors: list[tuple[str, torch.Tensor]] = []
    seen = set()
    for name, tensor in named_tensors(model).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors.append((rename(name) if rename else name, tensor))

    @torch.no_grad()
    def gathered(number: int) -> torch.Tensor:
        tensor = tensors[number][1].detach()
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return whole.to("cpu", _stored(tensor, dtype)).contiguous()

    written = ""
    cause: Exception | None = None
    if ranks.is_first:

        def give(number: int) -> torch.Tensor:
            ranks.text_of_first(str(number))  # the others gather it too
            return gathered(number)

        try:
            files, _ = _C.write_model_files(
                str(folder),
                [(name, list(tensor.shape)) for name, tensor in tensors],
                [_stored(tensor, dtype) for _, tensor in tensors],
                give,
                max_file_bytes,
            )
            written = "\n".join(files)
        except Exception as error:
            cause = error
        ranks.text_of_first("end")
    else:
        while (number := ranks.text_of_first("")) != "end":
            gathered(int(number))

    def check() -> None:
        if cause is not None:
            raise cause

    ranks.agreed(check)
    return [pathlib.Path(folder) / name for name in ranks.text_of_first(written).split("\n")]


def _stored(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
