"""The state of one fully_shard call: its hooks, and its place in the tree of units that the first root forward makes.

Hooks flatten and rebuild, one call into C++ an event; what happens then, and when, is the runtime's (ragged/fsdp/runtime.h).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed._composable_state import _get_module_state, _insert_module_state, _State
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from ragged_fsdp import _C, tree
from ragged_fsdp.mesh import DataMesh
from ragged_fsdp.extensions import ExtensionGatherer, has_protocol
from ragged_fsdp.params import ManagedGroup, ManagedParam, connect, reread


class CommContext:
    """What roots share after share_comm_ctx(): a buffer pool and a gather stream, those of the first root that runs."""

    def __init__(self) -> None:
        self.runtime: Any = None


class RaggedState(_State):
    """One a fully_shard call, shared by the modules of a list. Attributes that begin with an underscore and are named as in FSDP2 are there
    for torch's own helpers (pipelining, register_fsdp_forward_method), which reach for them on our modules too."""

    def __init__(self) -> None:
        super().__init__()
        self.modules: tuple[nn.Module, ...] = ()
        self.groups: list[ManagedGroup] = []
        self.mesh: DataMesh = None  # type: ignore[assignment]
        self.mp_policy = MixedPrecisionPolicy()
        self.offload_policy = OffloadPolicy()
        self.reshard_after_forward: bool | None = None
        self.name = ""
        self.index = 0  # of this unit in the runtime
        self.runtime: Any = None  # _C.Runtime; None until the first forward of the root
        self.tree: list[RaggedState] = []  # of the root: all states, itself first
        self.forward_prefetch: list[RaggedState] = []
        self.backward_prefetch: list[RaggedState] = []
        self.unshard_in_backward = True
        self.manual_finalization = False
        self.static_use = False
        self.merge_bytes: int | None = None
        self.keep_image = False  # to the end of backward, whether or not anybody holds its parameters
        self.post_optim_event: Any = None
        self._to_run: set[nn.Module] = set()  # modules of a list that this forward hasn't run yet
        self._is_root: bool | None = None
        self._comm_ctx = CommContext()
        self._solo: Any = None  # a runtime for calls to unshard() before there is a root

    def init(self, modules: tuple[nn.Module, ...]) -> None:
        self.modules = modules
        for module in modules:
            _insert_module_state(module, self)
            module.register_forward_pre_hook(self._pre_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._post_forward)
            module.register_state_dict_pre_hook(self._before_state_dict)
            module.register_load_state_dict_pre_hook(self._before_load)
            module.register_load_state_dict_post_hook(self._after_load)

    # ---- the tree ----

    def lazy_init(self) -> None:
        """Makes this state the root of all below it, once. Names, re-reads and checks parameters; no communication."""
        if self._is_root is not None:
            return
        if len(self.modules) > 1:
            raise RuntimeError(f"FSDP requires a single root module but got {self.modules}")
        root = self.modules[0]
        states: list[RaggedState] = []
        names: dict[RaggedState, list[str]] = {}
        parents: dict[RaggedState, int] = {self: -1}
        for name, module in root.named_modules():
            state = state_of(module)
            if state is None:
                continue
            if state is not self and state not in names and state._is_root is not None:
                raise RuntimeError(
                    f"FSDP state has already been lazily initialized for {name}\nFSDP requires running forward through the root module first"
                )
            if state not in names:
                names[state] = []
                states.append(state)
            names[state].append(name)
        for position, state in enumerate(states):
            state.index = position
            state.name = ", ".join(names[state])
        self._link(root, self, parents)
        self._prepare(states, {module: name for name, module in root.named_modules()})
        units = [state._runtime_unit(parents.get(state, 0)) for state in states]
        runtime = _C.Runtime(units, self.mesh.groups, self._comm_ctx.runtime)
        self._comm_ctx.runtime = runtime
        if runtime.gives_memory_back:
            for state in states:
                if any(parents.get(other) == state.index for other in states if other is not state):
                    state._watch_own_modules()
        for state in states:
            state._is_root = state is self
            state.runtime = runtime
            state._comm_ctx = self._comm_ctx
        self.tree = states
        for state in states:
            state.push_settings()

    def _watch_own_modules(self) -> None:
        """Of a unit with units inside, whose image may go before its backward ends (see "images that nobody holds" in ragged/fsdp/runtime.h):
        a module that activation checkpointing runs again asks for it. What the unit's own module does with its parameters nobody sees, so
        groups with such parameters keep theirs."""
        watched: set[nn.Module] = set()
        for group in self.groups:
            owners = {module for param in group.params for module, _ in param.places}
            if owners.isdisjoint(self.modules):
                watched |= owners
        self.push_keep_image()
        for module in watched:
            module.register_forward_pre_hook(self._before_own_module, prepend=True)

    def push_keep_image(self) -> None:
        for group in self.groups:
            own = any(module in self.modules for param in group.params for module, _ in param.places)
            group.core.reshards_when_unheld = not own and not self.keep_image

    def _before_own_module(self, module: nn.Module, args: Any) -> None:
        if self.runtime is not None:
            self.runtime.unshard_again(self.index)

    def _link(self, module: nn.Module, above: RaggedState, parents: dict[RaggedState, int], seen: set[nn.Module] | None = None) -> None:
        seen = set() if seen is None else seen
        if module in seen:
            return
        seen.add(module)
        state = state_of(module)
        if state is not None and state is not above:
            parents.setdefault(state, above.index)
            above = state
        for child in module.children():
            self._link(child, above, parents, seen)

    def _prepare(self, states: list[RaggedState], module_names: dict[nn.Module, str]) -> None:
        for param in (param for state in states for param in state.params):
            module, attribute = param.places[0]
            if module in module_names:
                param.name = ".".join(part for part in (module_names[module], attribute) if part)
        owner = {param.sharded: (state, param.name) for state in states for param in state.params}

        def elsewhere(state: RaggedState) -> Any:
            return lambda param: owner[param][1] if param in owner and owner[param][0] is not state else None

        for state in states:
            state.reread(elsewhere(state))
            for group in state.groups:
                _check_not_on_meta(group)
                state.connect_extensions(group)
                group.core.rename(state.name or "root", [param.name for param in group.params])
                group.core.reshard_after_forward = (
                    self is not state if state.reshard_after_forward is None else bool(state.reshard_after_forward)
                )

    def _runtime_unit(self, parent: int) -> Any:
        policy = self.mp_policy
        cores = [group.core for group in self.groups]
        return _C.RuntimeUnit(self.name or "root", parent, cores, policy.param_dtype, policy.output_dtype, policy.cast_forward_inputs)

    @property
    def params(self) -> list[ManagedParam]:
        return [param for group in self.groups for param in group.params]

    def reread(self, owned_elsewhere: Any = lambda param: None) -> None:
        for group in self.groups:
            if not group.core.is_sharded:
                continue
            core = group.core
            reread(group, owned_elsewhere)
            if group.core is not core and self.runtime is not None:
                raise RuntimeError(
                    f"[fully_shard] Expected parameters to keep their dtype once training has begun, but unit '{self.name}' was converted to "
                    f"{group.dtype}. Convert the model before its first forward."
                )

    def connect_extensions(self, group: ManagedGroup) -> None:
        """Local tensors may have been given gather methods up to now; from here on the group gathers one way."""
        locals_ = [param.sharded._local_tensor for param in group.params]  # type: ignore[attr-defined]
        if group.holds_subclasses or any(has_protocol(local) for local in locals_):
            connect(group, ExtensionGatherer(group.params, group.mesh, group.param_dtype, self.mp_policy))

    def push_settings(self) -> None:
        """What the setters of FSDPModule left here before there was a runtime."""
        if self.runtime is None:
            return
        self.runtime.set_prefetch(
            self.index, [state.index for state in self.forward_prefetch], [state.index for state in self.backward_prefetch]
        )
        self.runtime.set_unshard_in_backward(self.index, self.unshard_in_backward)
        if self._is_root:
            self.runtime.is_last_backward = not self.manual_finalization
            self.runtime.set_static_use(self.static_use)
            self.runtime.set_merge_bytes(self.merge_bytes)

    # ---- by hand ----

    def _own_runtime(self) -> tuple[Any, int]:
        """(runtime, index); before the root's first forward one of this unit's own."""
        if self.runtime is not None:
            return self.runtime, self.index
        if self._solo is None:
            self.reread()
            for group in self.groups:
                self.connect_extensions(group)
            self._solo = _C.Runtime([self._runtime_unit(-1)], self.mesh.groups)
        return self._solo, 0

    def unshard(self) -> Any:
        runtime, index = self._own_runtime()
        runtime.unshard(index)
        return lambda: runtime.wait_for_unshard(index)

    def reshard(self) -> None:
        if self.runtime is not None or self._solo is not None:
            runtime, index = self._own_runtime()
            runtime.reshard(index)

    # ---- hooks ----

    def _pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self._is_root is None:
            self.lazy_init()
        if len(self.modules) > 1 and not self._to_run:
            self._to_run = set(self.modules)
        if self._is_root and self.mesh.device.type != "cpu":
            args, kwargs = self._to_device(args, kwargs)
        if kwargs:
            tensors, rebuild = tree.split((args, kwargs))
        else:
            tensors, rebuild = tree.split(args)
        replaced = self.runtime.pre_forward(self.index, tensors)
        if replaced is None:
            return args, kwargs
        return rebuild(replaced) if kwargs else (rebuild(replaced), kwargs)

    def _post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        may_reshard = True
        if len(self.modules) > 1:
            self._to_run.discard(module)
            may_reshard = not self._to_run
        tensors, rebuild = tree.split(output)
        replaced = self.runtime.post_forward(self.index, tensors, may_reshard)
        return output if replaced is None else rebuild(replaced)

    def _to_device(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        from torch.distributed.utils import _to_kwargs

        if self.post_optim_event is not None:
            self.post_optim_event.wait()
            self.post_optim_event = None
        moved_args, moved_kwargs = _to_kwargs(args, kwargs, self.mesh.device, False)
        return moved_args[0], moved_kwargs[0]

    def _before_state_dict(self, *_: Any) -> None:
        self.reshard()

    def _before_load(self, *_: Any) -> None:
        self.reshard()

    def _after_load(self, *_: Any) -> None:
        self.reread()
        for group in self.groups:
            group.core.bump_master_version()

    # ---- names that torch's helpers use ----

    @property
    def _fsdp_param_groups(self) -> list[ManagedGroup]:
        return self.groups

    @property
    def _fsdp_param_group(self) -> ManagedGroup | None:
        return self.groups[0] if self.groups else None

    def _lazy_init(self) -> None:
        self.lazy_init()


def _check_not_on_meta(group: ManagedGroup) -> None:
    on_meta = [param.name for param in group.params if param.sharded._local_tensor.device.type == "meta"]  # type: ignore[attr-defined]
    if on_meta:
        raise RuntimeError(
            "FSDP parameters should be materialized from meta device before training, but the following were still on meta device: "
            f"{on_meta}\nFor example, call module.to_empty(device) to materialize to device and call module.reset_parameters() on each module to "
            "initialize values."
        )


def state_of(module: nn.Module) -> RaggedState | None:
    """The state of a module that our fully_shard was applied to."""
    state = _get_module_state(module)
    return state if isinstance(state, RaggedState) else None
