"""The types of the C++ core: the bindings of python/bindings/*.cpp, in their order. No documentation of what each part
does; that is in the headers of ragged/. tests/python/test_stubs.py holds the names against the extension.

Sizes, counts and indices are ints; a block is (kind, count, columns), as blocks.to_args() makes it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

_Pair = tuple[int, int]
_Block = tuple[str, int, int]

version: str
"""Of this package."""
torch_version: str
"""Of the torch that the extension was built with."""

# ---- module.cpp: errors ----

class RaggedError(RuntimeError):
    """What the library throws."""

class CommError(RaggedError):
    """A collective failed or timed out: a rank is lost or stalled."""

class CheckpointError(RaggedError):
    """A checkpoint is missing, damaged, or doesn't fit; or it can't be written."""

class InternalError(RaggedError):
    """A mistake of the library's."""

class InvalidArgument(RaggedError, ValueError):
    """Bad input."""

# ---- layout.cpp: index mathematics of placements ----

def normalize_ragged(dims: int, units: Sequence[int]) -> tuple[int, list[int]]:
    """(dims, units) with the units divided by their greatest common divisor."""

def ragged_intervals(shape: Sequence[int], dims: int, units: Sequence[int]) -> list[_Pair]:
    """Flat half-open interval of each rank in a row-major tensor of this shape."""

def ragged_from_intervals(shape: Sequence[int], by_rank: Sequence[_Pair]) -> tuple[int, list[int]]:
    """(dims, units) of the placement that gives rank r the r-th interval."""

def boxes(shape: Sequence[int], begin: int, end: int) -> list[tuple[list[int], list[int]]]:
    """[(offset, size)] of the boxes that a flat interval covers."""

def overlaps(source: Sequence[_Pair], target: Sequence[_Pair]) -> list[tuple[int, int, int, int]]:
    """[(source, target, begin, end)]: what each rank sends to each other when a flat tensor moves between layouts."""

def raise_block_for_shard(local_shape: Sequence[int], block: int, dim: int) -> int:
    """Block in elements that doesn't cut through dim `dim` of a tensor that a foreign Shard(dim) left here."""

# ---- init.cpp ----

def initial_values(kind: str, a: float, b: float, seed: int, name: str, begin: int, end: int) -> Tensor:
    """Elements [begin, end) of a parameter's initial values, 1-D float32, a function of (seed, name, element index).
    kind: constant (a), normal (mean a, deviation b), uniform in [a, b)."""

# ---- optim.cpp ----

_Rates = tuple[float, float, float, float, float, int]

def adamw_step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    images: Sequence[Tensor | None],
    rates: Sequence[_Rates],
    grad_scale: float,
) -> None:
    """One AdamW step of each piece, in place. rates: (lr, beta1, beta2, eps, weight decay, number of the step)."""

def adamw8bit_step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[Sequence[Tensor]],
    images: Sequence[Tensor | None],
    rates: Sequence[_Rates],
    places: Sequence[tuple[Sequence[int], int, int]],
    format: str,
    grad_scale: float,
) -> int:
    """The same with moments in tiles. states: codes and scales of the first moment, then of the second; places: (shape,
    begin, end) of the piece. Returns how many gradient elements weren't finite."""

def zero_code(format: str, is_signed: bool) -> int:
    """What a moment of zero is stored as."""

def decode_tiles(
    codes: Tensor, scales: Tensor, shape: Sequence[int], begin: int, end: int, format: str, is_signed: bool
) -> Tensor:
    """Moments as fp32, in the codes' shape, of elements [begin, end) of a parameter of this shape."""

# ---- muon.cpp ----

class MuonPlan:
    """Who orthogonalises what, and what travels: see ragged_fsdp.optim.Muon."""

    def __init__(
        self,
        names: Sequence[str],
        shapes: Sequence[Sequence[int]],
        held: Sequence[Sequence[_Pair]],
        splits: Sequence[int],
        buckets: Sequence[int],
        flatten: bool,
        momentum: float,
        nesterov: bool,
        scale: str,
        coefficients: str,
        num_steps: int,
        ns_dtype: torch.dtype,
        wire_dtype: torch.dtype,
        normuon: bool,
        row_beta2: float,
        share_replicas: bool,
        buckets_in_flight: int,
        shard: Communicator,
        replicate: Communicator,
    ) -> None: ...
    def set_momentum(self, momentum: float) -> None: ...
    def step(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        momenta: Sequence[Tensor],
        momentum_scales: Sequence[Tensor | None],
        row_exp_avg_sqs: Sequence[Tensor | None],
        lr: float,
        weight_decay: float,
        momentum_format: str,
        grad_scale: float,
        /,
    ) -> None:
        """In place; a parameter without gradient is untouched. Collective. Scales, in this format, where momenta are
        codes; row_exp_avg_sqs where the plan is NorMuon's."""

    def matrices(self) -> list[tuple[int, int, int, int, bool]]:
        """(parameter, rows, columns, root, whether the root holds all of it)."""

    @property
    def num_buckets(self) -> int: ...
    @property
    def loads(self) -> list[float]:
        """Cost by rank, in floating-point operations."""

# ---- soap.cpp ----

def soap_roots(
    names: Sequence[str],
    shapes: Sequence[Sequence[int]],
    held: Sequence[Sequence[_Pair]],
    splits: Sequence[int],
    buckets: Sequence[int],
    flatten: bool,
    precondition_frequency: int,
    max_precondition_dim: int,
    ranks: int,
) -> list[tuple[int, int, int, int, bool]]:
    """(parameter, rows, columns, root, whether the root holds all of it) of each matrix. Nothing is sent."""

class SoapPlan:
    """Who holds which matrix's states, and what travels: see ragged_fsdp.optim.SOAP."""

    def __init__(
        self,
        names: Sequence[str],
        shapes: Sequence[Sequence[int]],
        held: Sequence[Sequence[_Pair]],
        splits: Sequence[int],
        buckets: Sequence[int],
        flatten: bool,
        beta1: float,
        beta2: float,
        eps: float,
        precondition_frequency: int,
        max_precondition_dim: int,
        wire_dtype: torch.dtype,
        buckets_in_flight: int,
        shard: Communicator,
        replicate: Communicator,
    ) -> None: ...
    def set_math(
        self,
        beta1: float,
        beta2: float,
        eps: float,
        precondition_frequency: int,
        max_precondition_dim: int,
        wire_dtype: torch.dtype,
    ) -> None:
        """Of the steps to come; the last two stay what they are."""

    def step(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        steps: Sequence[int],
        rooted: Sequence[tuple[int, Sequence[Tensor | None]]],
        lr: float,
        weight_decay: float,
        grad_scale: float,
        /,
    ) -> None:
        """In place; a parameter without gradient is untouched. Collective. steps: how many each parameter has taken,
        this one included; rooted: number of a matrix and its L, R, Q_L, Q_R, exp_avg and exp_avg_sq, of those whose
        root this rank is and whose parameter has a gradient."""

    def matrices(self) -> list[tuple[int, int, int, int, bool]]:
        """As soap_roots() has them."""

    @property
    def loads(self) -> list[float]:
        """Share of all operations plus share of all state, by rank."""

# ---- checkpoint.cpp ----

def agree(all: Communicator, problem: str | None, is_invalid: bool) -> None:
    """Raises on all ranks what `problem` says on some, as InvalidArgument or CheckpointError. Collective."""

def broadcast_text(all: Communicator, text: str, root: int) -> str:
    """The text that rank `root` has, on every rank. Collective."""

def stored_dtype(dtype: torch.dtype) -> str:
    """safetensors' name of a dtype: "BF16"."""

class CheckpointPart:
    """Elements [begin, end) of a tensor of this shape, or of the box (offset, size) of it that `within` is: their
    memory, 1-D and contiguous, and whether this rank writes them."""

    def __init__(
        self,
        name: str,
        local: Tensor,
        shape: Sequence[int],
        begin: int,
        end: int,
        within: tuple[Sequence[int], Sequence[int]] | None,
        writes: bool,
        announces_empty: bool,
        format: str,
        placement: str,
    ) -> None: ...

class CheckpointSaver:
    """Writes the checkpoints of one run."""

    def __init__(self, all: Communicator, root: str) -> None: ...
    def start(
        self,
        step: int,
        parts: Sequence[CheckpointPart],
        texts: dict[str, str],
        integers: dict[str, int],
        rank_texts: dict[str, str],
        keep: int,
        is_async: bool,
        timeout_s: float,
    ) -> None:
        """Writes this rank's files, or copies its tensors and lets a thread write them. Collective."""

    def finish(self) -> dict[str, Any]:
        """Waits for all ranks and publishes. Collective."""

    def progress(self) -> tuple[int, int, float]:
        """(bytes written, bytes in all, seconds) of this rank."""

    @property
    def is_busy(self) -> bool: ...
    @property
    def is_written(self) -> bool: ...

def newest_checkpoint(root: str) -> tuple[str | None, list[str]]:
    """(folder of the newest complete checkpoint, a line for each damaged one that was passed over)."""

def checkpoint_index(folder: str) -> dict[str, Any]:
    """step, world_size, tensors (name -> (dtype, shape, format)) and facts."""

def load_checkpoint(
    all: Communicator, folder: str, parts: Sequence[CheckpointPart], allow_unused: bool, verify_first: bool
) -> dict[str, Any]:
    """Fills the parts' memory. Collective."""

def verify_checkpoint(folder: str) -> None:
    """Reads all of a checkpoint against its checksums."""

class ModelFiles:
    """Tensors of a folder of safetensors."""

    def __init__(self, folder: str) -> None: ...
    def names(self) -> list[str]: ...
    def describe(self, name: str) -> tuple[str, tuple[int, ...]] | None:
        """(dtype, shape); None where there is none of this name."""

    def read(self, name: str, stored: torch.dtype, part: CheckpointPart) -> None:
        """Fills a part's memory from a tensor that is `stored` in this dtype."""

def write_model_files(
    folder: str,
    tensors: Sequence[tuple[str, Sequence[int]]],
    dtypes: Sequence[torch.dtype],
    give: Callable[[int], Tensor],
    max_file_bytes: int,
) -> tuple[list[str], int]:
    """(files, bytes) of a new folder; `give` hands over a whole tensor on the CPU, contiguous, when it is due."""

# ---- fsdp.cpp: groups ----

class Communicator:
    """A process group's collectives; without a name, or alone in its group, it does nothing."""

    def __init__(
        self,
        group_name: str | None,
        device: torch.device,
        name: str,
        stock: bool = False,
        check_order: bool = False,
    ) -> None: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def is_stock(self) -> bool:
        """Whether it issues the operations that FSDP2 does."""

    def broadcast(self, tensor: Tensor, root: int, unit: str, /) -> None:
        """In place; returns when done."""

class MeshGroups:
    """Who shards and who replicates."""

    def __init__(
        self, shard: Communicator, replicate: Communicator, ranks: Sequence[int], rank: int, device: torch.device
    ) -> None: ...

class PythonParam:
    """The objects of one parameter, and the places in modules that hold it."""

    def __init__(
        self,
        sharded: Parameter,
        unsharded: Parameter,
        gradient_spec: Any,
        places: Sequence[tuple[dict[str, Any], str]],
    ) -> None: ...

class PythonCalls:
    """What a group calls in Python."""

    def __init__(
        self,
        wrap: Callable[[Tensor, Any], Tensor],
        dense_gradient: Callable[[Parameter, Tensor], Tensor],
        local_gradient: Callable[[Parameter], Tensor],
        run_hooks: Callable[[Parameter], None],
    ) -> None: ...

class ParamGroup:
    """Parameters that share one plan, one image and one collective."""

    gradients_in_place: str
    requires_gradient_sync: bool
    requires_all_reduce: bool
    reshard_after_forward: bool
    reshard_after_backward: bool
    is_behind: bool
    gradients_over_weights: bool
    reshards_when_unheld: bool
    gradient_divide_factor: float | None

    def __init__(
        self,
        names: Sequence[str],
        shapes: Sequence[Sequence[int]],
        requires_grad: Sequence[bool],
        blocks: Sequence[_Block | None],
        dtype: torch.dtype,
        param_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype | None,
        groups: MeshGroups,
        values: Sequence[Tensor | None],
        front_holds_values: bool = False,
        offload: bool = False,
        pin_memory: bool = False,
        planning: PlanOptions = ...,
    ) -> None: ...
    def set_front(self, params: Sequence[PythonParam], calls: PythonCalls, gatherer: Any = None) -> None:
        """The Python side of the parameters; a gatherer makes the unsharded ones itself."""

    def set_sharded(self, param: int, sharded: Parameter, /) -> None:
        """Another object took the sharded parameter's place."""

    def image(self, param: int, /) -> Tensor:
        """Parameter i of the unsharded image; its bytes come and go."""

    def master(self, param: int, /) -> Tensor:
        """This rank's piece of parameter i, 1-D."""

    def flat_masters(self) -> Tensor:
        """The pieces of all parameters, 1-D, padding included."""

    def flat_grads(self) -> Tensor: ...
    def set_master(self, param: int, local: Tensor, /) -> None:
        """Writes this rank's piece of parameter i, 1-D."""

    def mark_initialised(self) -> None: ...
    def bump_master_version(self) -> None: ...
    def placement(self, param: int, /) -> tuple[int, list[int]]:
        """(dims, units) of parameter i over the shard dim."""

    def set_small_group(self, group: Communicator, /) -> None:
        """Neighbouring ranks that keep the image together between forward and backward."""

    def converted(
        self, dtype: torch.dtype, param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None
    ) -> ParamGroup:
        """The same layout with other dtypes."""

    def rename(self, unit: str, params: Sequence[str], /) -> None:
        """Fully qualified names, for messages and profiles."""

    @property
    def is_sharded(self) -> bool: ...
    @property
    def image_bytes(self) -> int: ...
    @property
    def plan_text(self) -> str: ...
    @property
    def plan_json(self) -> str: ...
    @property
    def padding(self) -> int:
        """Elements."""

    @property
    def image_numel(self) -> int: ...
    @property
    def local_numel(self) -> int: ...
    def set_all_reduce_hook(self, hook: Callable[[Tensor], None] | None, /) -> None:
        """Sees each reduced gradient shard, 1-D, before it is published or added."""

# ---- fsdp.cpp: the runtime ----

class PlanOptions:
    """How a bucket may be laid out; see ragged_fsdp.Planning."""

    def __init__(
        self,
        strategy: str,
        max_uniform_segments: int,
        max_ragged_blocks: int,
        segment_cost: int,
        ragged_segment_cost: int,
        ragged_block_cost: int,
    ) -> None: ...

def plan_bucket(
    names: Sequence[str],
    shapes: Sequence[Sequence[int]],
    trainable: Sequence[bool],
    blocks: Sequence[tuple[str, int, int] | None],
    world_size: int,
    element_bytes: int,
    options: PlanOptions,
) -> tuple[str, str, dict[str, int]]:
    """(JSON, text, numbers) of a bucket's plan; `element_bytes` of the narrowest dtype that travels."""

def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear, whose weight's gradient is computed in place where it can be."""

def embedding(weight: Tensor, indices: Tensor, padding_index: int) -> Tensor:
    """F.embedding, likewise; -1: no padding."""

class RuntimeUnit:
    """What one fully_shard call took."""

    def __init__(
        self,
        name: str,
        parent: int,
        groups: Sequence[ParamGroup],
        param_dtype: torch.dtype | None,
        output_dtype: torch.dtype | None,
        cast_forward_inputs: bool,
    ) -> None: ...

class Runtime:
    """The units of one root, the root first, and what happens when. Units are named by their index."""

    is_last_backward: bool
    gives_memory_back: bool

    def __init__(
        self,
        units: Sequence[RuntimeUnit],
        groups: MeshGroups,
        shares: Runtime | None = None,
    ) -> None: ...
    def pre_forward(self, unit: int, tensors: Sequence[Tensor], /) -> list[Tensor] | None:
        """Gathers; the tensors that replace the inputs, None when none changes."""

    def post_forward(self, unit: int, tensors: Sequence[Tensor], may_reshard: bool, /) -> list[Tensor] | None:
        """Reshards; the tensors that replace the outputs, None when none changes."""

    def check_ranks_agree(self) -> None:
        """Raises when the ranks' models or options differ; a collective."""

    def unshard(self, unit: int, /) -> None:
        """Starts a gather."""

    def wait_for_unshard(self, unit: int, /) -> None: ...
    def reshard(self, unit: int, /) -> None: ...
    def unshard_again(self, unit: int, /) -> None: ...
    def finish_backward(self) -> None: ...
    def reset(self) -> None:
        """Back to the state before a forward, after an exception."""

    def reset_peaks(self) -> None: ...
    def stats(self) -> dict[str, Any]: ...
    def forecast(self, micro_batches: int = 1, sync_each: bool = False) -> dict[str, int]: ...
    def set_prefetch(self, unit: int, forward: Sequence[int], backward: Sequence[int], /) -> None: ...
    def set_unshard_in_backward(self, unit: int, value: bool, /) -> None: ...
    def set_static_use(self, value: bool, /) -> None: ...
    def set_merge_bytes(self, value: int | None, /) -> None: ...
