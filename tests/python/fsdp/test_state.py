"""What fully_shard does to a module object: its class, its state, what it refuses. No training."""

import copy
import inspect

import pytest
from models import MLP, stack
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule

from harness import only_ours, shard, subject, threads


def test_each_call_has_a_state_of_its_own():
    def body():
        model = stack(3)
        shard(model, model)
        states = [subject().fully_shard.state(m) for m in (model, *model)]
        assert None not in states
        assert len({id(s) for s in states}) == 4

    threads(1, body)


def test_second_call_on_a_module_is_refused():
    def body():
        model = shard(MLP())
        with pytest.raises(AssertionError, match="can only be applied to a module once"):
            subject().fully_shard(model)

    threads(1, body)


def test_class_changes_in_place_and_only_for_the_module():
    def body():
        model = shard(MLP())
        assert isinstance(model, MLP) and isinstance(model, subject().FSDPModule)
        assert type(model).__name__ == "FSDPMLP"
        assert not any(isinstance(m, subject().FSDPModule) for m in model.children())
        assert isinstance(model, TorchFSDPModule), "trainers look for torch's own class"

    threads(1, body)


def test_slice_of_a_sharded_sequential_is_plain():
    def body():
        model = shard(stack(3))
        part = model[:2]
        assert type(model).__name__ == "FSDPSequential"
        assert isinstance(part, nn.Sequential) and not isinstance(part, subject().FSDPModule)

    threads(1, body)


@pytest.mark.parametrize("container", [nn.ModuleList, nn.ModuleDict])
def test_containers_without_forward_are_refused(container):
    def body():
        children = [MLP(), MLP()] if container is nn.ModuleList else {"a": MLP(), "b": MLP()}
        with pytest.raises(ValueError, match="does not support containers that do not implement forward"):
            subject().fully_shard(container(children))

    threads(1, body)


def test_deepcopy_is_refused_with_the_reason():
    def body():
        model = shard(MLP())
        with pytest.raises(AssertionError, match="does not support deepcopy"):
            copy.deepcopy(model)

    threads(1, body)


def test_parameter_names_do_not_change():
    def body():
        model = stack(2)
        names = [n for n, _ in model.named_parameters()]
        shard(model, model)
        assert [n for n, _ in model.named_parameters()] == names
        assert list(model.state_dict()) == names

    threads(2, body)


def test_list_of_modules_forms_one_group_and_is_returned():
    def body():
        model = stack(3)
        pair = [model[0], model[1]]
        assert subject().fully_shard(pair) == pair
        subject().fully_shard(model)
        assert subject().fully_shard.state(model[0]) is subject().fully_shard.state(model[1])
        assert subject().fully_shard.state(model[2]) is None

    threads(2, body)


@only_ours("stock passes trivially")
def test_every_public_method_of_the_installed_fsdp_module_is_ours():
    """An inherited method would reach for private state of FSDP2 that our modules don't have."""
    mine = vars(subject().FSDPModule) if subject().FSDPModule is not TorchFSDPModule else None
    if mine is None:  # re-exported for isinstance; the class that modules get is what counts
        mine = {}
        threads(
            1,
            lambda: mine.update(
                {
                    k: v
                    for c in type(shard(MLP())).__mro__
                    if c.__module__.startswith("ragged_fsdp")
                    for k, v in vars(c).items()
                }
            ),
        )
    names = [n for n, f in vars(TorchFSDPModule).items() if inspect.isfunction(f) and not n.startswith("__")]
    assert names, "torch's class has no methods: look again at how it is made"
    assert not [n for n in names if n not in mine]


@only_ours("the package's own surface")
def test_public_names():
    expected = """fully_shard FSDPModule MixedPrecisionPolicy CPUOffloadPolicy OffloadPolicy UnshardHandle
        register_fsdp_forward_method share_comm_ctx DataParallelMeshDims rows elements whole tile summary stats install
        clip_grad_norm_ RaggedShard RaggedTensor distribute_tensor""".split()
    missing = [n for n in expected if not hasattr(subject(), n)]
    assert not missing
    undocumented = [n for n in expected if not (getattr(subject(), n).__doc__ or "").strip()]
    assert not undocumented
    import torch.distributed.fsdp as stock

    stock_parameters = inspect.signature(stock.fully_shard).parameters
    assert set(stock_parameters) <= set(inspect.signature(subject().fully_shard).parameters)
