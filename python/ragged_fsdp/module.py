"""FSDPModule: what a module that fully_shard was applied to can do. A subclass of torch's, so that every trainer's isinstance check holds, with
every method overridden: an inherited one would reach for FSDP2's private state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed import fsdp as torch_fsdp

from ragged_fsdp import _C
from ragged_fsdp.state import RaggedState, state_of


_TorchFSDPModule = torch_fsdp.FSDPModule


class UnshardHandle:
    """What unshard(async_op=True) returns; wait() makes the parameters usable. Repeated waits do nothing."""

    def __init__(self, wait: Callable[[], None] | None) -> None:
        self._wait = wait

    def wait(self) -> None:
        """Blocks until the gather is done; the module's parameters are the unsharded ones from then on."""
        if self._wait is not None:
            wait, self._wait = self._wait, None
            wait()


class GradientReductionHandle:
    """What finalize_backward(async_op=True) returns; wait() ends the reductions and publishes gradients."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait: Callable[[], None] | None = wait

    def wait(self) -> None:
        """Blocks until every gradient is in .grad."""
        if self._wait is not None:
            wait, self._wait = self._wait, None
            wait()


def _no(method: str, reason: str) -> NoReturn:
    raise NotImplementedError(f"[{method}] {reason}")


class FSDPModule(_TorchFSDPModule):
    """Mixed into the class of a sharded module: `isinstance(m, FSDPModule)` holds for ours and torch's. Methods are FSDP2's of torch 2.15, with
    the same defaults; those that steer copies which don't happen here raise and say so. Settings may be made before the first forward."""

    # Of the class that fully_shard generates: (generated, ours, torch's, original, ...).
    _orig_cls_mro_index = 3

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Slicing an nn.Sequential, say, gives an ordinary module of the original class."""
        original = cls.__mro__[cls._orig_cls_mro_index]
        module = original.__new__(original, *args, **kwargs)
        module.__init__(*args, **kwargs)
        return module

    def extra_repr(self) -> str:
        """Adds the unit's layout to the module's own line in print(model)."""
        own, state = super().extra_repr(), state_of(self)
        if state is None or not state.groups:
            return own
        parts = []
        for group in state.groups:
            core = group.core
            parts.append(
                f"{len(group.params)} parameters, {core.image_numel:,} elements over {group.mesh.shard_size} ranks, "
                f"padding {core.padding:,}, {str(group.param_dtype or group.dtype).removeprefix('torch.')} image"
            )
        return ", ".join(part for part in (own, f"ragged: {'; '.join(parts)}") if part)

    # ---- gathering by hand ----

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers this module's own parameters, not its children's. Collective over the shard group. Returns a handle if `async_op`, else
        waits. Does nothing when they are there."""
        wait = self._get_fsdp_state().unshard()
        handle = UnshardHandle(wait)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Drops this module's own unsharded parameters; the module holds the sharded ones again."""
        self._get_fsdp_state().reshard()

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Accepted: gathers are always asynchronous until their unit waits."""

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """True: on a CPU, where an image's memory goes back once nobody holds its parameters, a unit with units inside (the root) keeps its own
        to the end of its backward. For regions under activation checkpointing that take such parameters without calling the modules that own
        them. On other devices the pool keeps the memory in any case."""
        for state in self._states(recurse):
            state.keep_image = keep
            state.push_keep_image()

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """False: backward needs no values of this module's own parameters (an embedding's) and doesn't gather them."""
        state = self._get_fsdp_state()
        state.unshard_in_backward = unshard_in_backward
        state.push_settings()

    # ---- when to reshard, reduce, prefetch ----

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """False: the end of backward leaves reductions in flight and .grad as it is; the next backward with True publishes all. On the root."""
        state = self._get_fsdp_state()
        state.lazy_init()
        state.runtime.is_last_backward = is_last_backward

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """True: gradients are published by finalize_backward() alone (pipeline schedules). On the root."""
        state = self._get_fsdp_state()
        if state._is_root is False:
            raise RuntimeError("set_manual_backward_finalization must be called on the root FSDP module")
        state.manual_finalization = enabled
        state.push_settings()

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Ends what backwards left open under set_manual_backward_finalization: reduces gradients that were kept unsynchronised, publishes
        all of them, and reshards, by the settings of now. Collective. Nothing before the first forward. Returns a handle if `async_op`."""
        state = self._get_fsdp_state()
        if state._is_root is None:  # nothing has run
            return GradientReductionHandle(lambda: None) if async_op else None
        if not state._is_root:
            raise RuntimeError("finalize_backward must be called on the root FSDP module")
        if async_op:
            return GradientReductionHandle(state.runtime.finish_backward)
        state.runtime.finish_backward()
        return None

    def reset_iter_state(self) -> None:
        """After an exception that all ranks share: waits for what is in flight and drops everything half done. The next forward of the root
        also does so by itself."""
        state = self._get_fsdp_state()
        if state.runtime is not None:
            state.runtime.reset()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """False: gradients of coming backwards are kept unreduced, added up in the reduce dtype, until one with True."""
        for state in self._states(recurse):
            for group in state.groups:
                group.core.requires_gradient_sync = requires_gradient_sync
                group.core.requires_all_reduce = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """False (HSDP): reduce-scatter each time, and leave the sum over replicas to a later backward."""
        for state in self._states(recurse):
            for group in state.groups:
                group.core.requires_all_reduce = requires_all_reduce

    def set_reshard_after_forward(self, reshard_after_forward: bool | int, recurse: bool = True) -> None:
        """As the argument of fully_shard; takes effect at the next forward."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}")
        for state in self._states(recurse):
            state.reshard_after_forward = reshard_after_forward
            for group in state.groups:
                group.core.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """False: parameters stay gathered after backward; the next forward gathers again only if they changed."""
        for state in self._states(recurse):
            for group in state.groups:
                group.core.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: list[torch_fsdp.FSDPModule]) -> None:
        """Modules whose gathers are issued with this one's in forward."""
        state = self._get_fsdp_state()
        state.forward_prefetch = _states_of(modules)
        state.push_settings()

    def set_modules_to_backward_prefetch(self, modules: list[torch_fsdp.FSDPModule]) -> None:
        """Modules whose gathers are issued with this one's in backward, in place of the next one's."""
        state = self._get_fsdp_state()
        state.backward_prefetch = _states_of(modules)
        state.push_settings()

    # ---- reduction ----

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None], *, stream: Any = None) -> None:
        """`hook(flat)` sees each unit's reduced, flat gradient shard (1-D, the parameters' dtype) before it reaches .grad, and may change it.
        Runs on the stream of the reduction: `stream` must be None."""
        if stream is not None:
            raise ValueError("stream cannot be set: [set_all_reduce_hook] Expected stream None. The hook runs after the unit's own all-reduce.")
        for state in self._states(recurse=True):
            for group in state.groups:
                group.core.set_all_reduce_hook(hook)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Gradients of this module's own parameters are summed and divided by it, instead of by the number of ranks."""
        for group in self._get_fsdp_state().groups:
            group.core.gradient_divide_factor = float(factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Older name of set_gradient_divide_factor."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Accepted: reductions are always sums, scaled afterwards."""

    def set_reduce_scatter_unused_params(self, enable: bool, *, recurse: bool = True) -> None:
        """Accepted: a unit's reduction always has the same size, with zeros for parameters that a rank didn't use."""

    def set_static_use(self, static_use: bool) -> None:
        """Ours alone. True: in each step every rank uses the same of this tree's parameters, so that ranks needn't tell each other which ones have
        a gradient (one small all-reduce a backward), and gradients of what this rank didn't use stay None. On the root."""
        state = self._get_fsdp_state()
        if state._is_root is False:
            raise RuntimeError("set_static_use must be called on the root FSDP module")
        state.static_use = static_use
        state.push_settings()

    def set_merge_bytes(self, merge_bytes: int | None) -> None:
        """Ours alone. On a CPU with Gloo, units whose parameters are small are gathered together, and reduced together, up to so many bytes a
        collective: its latency is all that it costs. 0: each unit by itself. None, the default: half a MiB. On the root."""
        state = self._get_fsdp_state()
        if state._is_root is False:
            raise RuntimeError("set_merge_bytes must be called on the root FSDP module")
        if merge_bytes is not None and (isinstance(merge_bytes, bool) or not isinstance(merge_bytes, int) or merge_bytes < 0):
            raise ValueError(f"[set_merge_bytes] Expected None or bytes of at least 0, but got {merge_bytes!r}.")
        state.merge_bytes = merge_bytes
        state.push_settings()

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Accepted from 1 up: at most one reduction and one that is being filled are alive."""
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers must be an int, got {type(max_input_buffers)}")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be at least 1, got {max_input_buffers}")

    def set_post_optim_event(self, event: torch.Event) -> None:
        """The next root forward waits for this event before it gathers; consumed once."""
        self._get_fsdp_state().post_optim_event = event

    # ---- what has no meaning here ----

    def set_custom_all_gather(self, comm: Any) -> None:
        """Raises NotImplementedError."""
        _no("set_custom_all_gather", "Parameters are views of the buffer that is gathered in place; there is no separate output to allocate.")

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Raises NotImplementedError."""
        _no("set_custom_reduce_scatter", "Gradients are cast straight into the buffer that is reduced; use set_all_reduce_hook to see the result.")

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Raises NotImplementedError unless `enable` is False."""
        if enable:
            _no("set_separate_reduce_scatter_group", "Collectives of a unit share one group, whose order all ranks agree on.")

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Raises NotImplementedError unless `enable` is False."""
        if enable:
            _no("set_allocate_memory_from_process_group_for_comm", "Buffers come from the pool's allocator; the group's own isn't supported yet.")

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Raises NotImplementedError."""
        _no("set_symm_mem_for_comm", "Symmetric memory isn't supported yet; leave this call out.")

    # ---- inside ----

    def _get_fsdp_state(self) -> RaggedState:
        state = state_of(self)
        if state is None:
            raise AssertionError(f"No FSDP state found on {self}")
        return state

    def _states(self, recurse: bool) -> Iterator[RaggedState]:
        seen = set()
        for module in self.modules() if recurse else [self]:  # type: ignore[attr-defined]
            state = state_of(module)
            if state is not None and state not in seen:
                seen.add(state)
                yield state

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """module.to(), cuda(), float(), to_empty(): converts the sharded parameters, then takes the new values into the masters."""
        state = self._get_fsdp_state()
        state.reshard()
        result = super(_TorchFSDPModule, self)._apply(*args, **kwargs)  # type: ignore[misc]
        with torch.no_grad():
            state.reread()
        return result


def _states_of(modules: list[Any]) -> list[RaggedState]:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"Expects FSDPModule but got {type(module)}: {module}")
    return [module._get_fsdp_state() for module in modules]


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Makes `module.method_name(...)` gather and drop the module's parameters as forward does. Nothing happens for a module that isn't sharded.

    Raises ValueError if there is no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    if not hasattr(module, method_name):
        raise ValueError(f"{type(module)} does not have a method {method_name}")
    original = getattr(module, method_name)

    def wrapped(self: FSDPModule, *args: Any, **kwargs: Any) -> Any:
        state = self._get_fsdp_state()
        args, kwargs = state._pre_forward(self, args, kwargs)  # type: ignore[arg-type]
        return state._post_forward(self, args, original(*args, **kwargs))  # type: ignore[arg-type]

    setattr(module, method_name, wrapped.__get__(module, type(module)))


def share_comm_ctx(modules: list[torch_fsdp.FSDPModule]) -> None:
    """Several roots on one rank (pipeline stages) use one buffer pool and one gather stream. Before any of them has run."""
    states = _states_of(modules)
    for state in states[1:]:
        if state.runtime is not None:
            raise _C.InvalidArgument(
                f"[share_comm_ctx] Expected modules that haven't run yet, but unit '{state.name}' has. Call it before the first forward."
            )
        state._comm_ctx = states[0]._comm_ctx
