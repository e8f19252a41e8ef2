"""One function a system: it takes a model and makes it train sharded, each as its documentation says for such a run.

All train with AdamW without weight decay, one unit a layer and the rest in the root. What a system needs to run on a
CPU, or to compute the same as the others, is written at the line that does it.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

LEARNING_RATE = 3e-4


@dataclasses.dataclass
class Running:
    """A model in training. `forward_backward` returns the rank's loss, detached; `update` steps and drops gradients."""

    model: Any
    forward_backward: Callable[[torch.Tensor], torch.Tensor]
    update: Callable[[], None]


@dataclasses.dataclass(frozen=True)
class Job:
    """What a system is told besides the model."""

    rank: int
    world: int
    bf16: bool  # compute in bf16 with fp32 masters, gradients reduced in fp32
    port: int  # free on this machine, the same on all ranks: for systems that connect their ranks themselves


def adamw(params: Any) -> torch.optim.Optimizer:
    """Torch's fused step: of its three the fastest on a CPU, and the one without temporaries as large as parameters."""
    return torch.optim.AdamW(params, lr=LEARNING_RATE, weight_decay=0.0, fused=True)


def plain_loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> Running:
    def forward_backward(data: torch.Tensor) -> torch.Tensor:
        loss = model(data)
        loss.backward()
        return loss.detach()

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Running(model, forward_backward, update)


def cast_floats(run: Running, job: Job) -> Running:
    """For systems that don't cast what goes into the model."""
    inner = run.forward_backward
    if not job.bf16:
        return run
    return dataclasses.replace(
        run, forward_backward=lambda data: inner(data.bfloat16() if data.is_floating_point() else data)
    )


def cpu_mesh(world: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (world,))


# --- torch's own ------------------------------------------------------------------------------------------------------


def single(model: nn.Module, job: Job) -> Running:
    """One process, nothing sharded; in bf16 the whole model is."""
    model = model.bfloat16() if job.bf16 else model
    return cast_floats(plain_loop(model, adamw(p for p in model.parameters() if p.requires_grad)), job)


def ddp(model: nn.Module, job: Job) -> Running:
    if job.bf16:
        raise NotImplementedError("DDP has no mixed precision of its own with fp32 gradients")
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return plain_loop(wrapped, adamw(p for p in wrapped.parameters() if p.requires_grad))


def fsdp1(model: nn.Module, job: Job) -> Running:
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    mixed = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if job.bf16 else None
    # Without device_id it looks for an accelerator and gives up; limit_all_gathers needs one.
    model = FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({type(model.layers[0])}), device_id=torch.device("cpu"),
        use_orig_params=True, limit_all_gathers=False, mixed_precision=mixed)  # fmt: skip
    return plain_loop(model, adamw(p for p in model.parameters() if p.requires_grad))


def shard_layers(model: nn.Module, fully_shard: Callable[..., Any]) -> None:
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)


def policy(job: Job) -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if not job.bf16:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def fsdp2(model: nn.Module, job: Job) -> Running:
    from torch.distributed.fsdp import fully_shard

    shard_layers(model, functools.partial(fully_shard, mesh=cpu_mesh(job.world), mp_policy=policy(job)))
    return plain_loop(model, adamw(p for p in model.parameters() if p.requires_grad))


# --- other packages ---------------------------------------------------------------------------------------------------


def deepspeed_zero3(model: nn.Module, job: Job) -> Running:
    import deepspeed

    # Its defaults (a reduce bucket of 5e8 elements, 1e9 that may stay gathered) would keep all of these models
    # gathered and allocate 2 GB: they are set to one unit instead. It clips to norm 1 unless told otherwise.
    unit = max(sum(p.numel() for p in layer.parameters()) for layer in model.layers)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {
            "stage": 3, "overlap_comm": False, "contiguous_gradients": True,
            "stage3_param_persistence_threshold": 0, "reduce_bucket_size": unit, "stage3_prefetch_bucket_size": unit,
            "stage3_max_live_parameters": 2 * unit, "stage3_max_reuse_distance": 0,
        },
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": job.bf16},
        "steps_per_print": 10**9,
    }  # fmt: skip
    if job.bf16:
        config["communication_data_type"] = "fp32"
    optimizer = adamw(p for p in model.parameters() if p.requires_grad)
    engine, _, _, _ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, dist_init_required=False)  # fmt: skip

    def forward_backward(data: torch.Tensor) -> torch.Tensor:
        loss = engine(data)
        engine.backward(loss)
        return loss.detach()

    return cast_floats(Running(engine, forward_backward, engine.step), job)


def megatron_v1(model: nn.Module, job: Job) -> Running:
    from bench.peers import cuda_names

    cuda_names.install()
    import megatron_fsdp
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (job.world, 1), mesh_dim_names=("fsdp", "tp"))  # it wants a tp dim
    model = model.bfloat16() if job.bf16 else model
    # Where parameters keep their dtypes, naming one for main parameters would keep a second copy of them.
    main = torch.float32 if job.bf16 else None
    mixed = megatron_fsdp.MixedPrecisionPolicy(main_params_dtype=main, main_grads_dtype=main)
    wrapped, optimizer = megatron_fsdp.fully_shard(
        module=model, optimizer=adamw(p for p in model.parameters() if p.requires_grad), device_mesh=mesh,
        dp_shard_dim="fsdp", tp_dim="tp", fsdp_unit_modules=[type(model.layers[0])], device=torch.device("cpu"),
        mixed_precision_policy=mixed, overlap_grad_reduce=False, overlap_param_gather=False,
        # Parameters with ".experts." in their name have a group of their own; here it is that of all ranks.
        expt_device_mesh=init_device_mesh("cpu", (job.world, 1), mesh_dim_names=("fsdp", "tp")))  # fmt: skip
    wrapped.ddp_config.gradient_reduce_div_fusion = False  # else PREMUL_SUM, which Gloo refuses
    # Wrapping takes a step with zero gradients to create the states; its count would make later steps others.
    for state in optimizer.state.values():
        state["step"].zero_()
    return cast_floats(plain_loop(wrapped, optimizer), job)


def megatron_v2(model: nn.Module, job: Job) -> Running:
    from bench.peers import cuda_names

    cuda_names.install()
    from megatron_fsdp.experimental import Flat, Placements, fully_shard, fully_shard_optimizer
    from megatron_fsdp.mixed_precision import MixedPrecisionPolicy

    mesh = cpu_mesh(job.world)
    model = model.bfloat16() if job.bf16 else model
    placements = Placements(dp_axes=[0], parameter=[Flat()], gradient=[Flat()], optimizer=[Flat()])
    mixed = MixedPrecisionPolicy(main_params_dtype=torch.float32, main_grads_dtype=torch.float32)
    shard_layers(model, lambda module: fully_shard(module, mesh, placements, mixed))
    optimizer = adamw(p for p in model.parameters() if p.requires_grad)
    fully_shard_optimizer(optimizer)
    return cast_floats(plain_loop(model, optimizer), job)


# --- ours -------------------------------------------------------------------------------------------------------------


def ragged_python(model: nn.Module, job: Job, *, own_optimizer: bool = False, **options: Any) -> Running:
    """`options` go to fully_shard. With torch's optimizer, what differs from FSDP2 is sharding alone."""
    import ragged_fsdp

    shard_layers(model, functools.partial(
        ragged_fsdp.fully_shard, mesh=cpu_mesh(job.world), mp_policy=policy(job), **options))  # fmt: skip
    params = [p for p in model.parameters() if p.requires_grad]
    if own_optimizer:
        from ragged_fsdp.optim import AdamW

        return plain_loop(model, AdamW(params, lr=LEARNING_RATE, weight_decay=0.0))
    return plain_loop(model, adamw(params))


def native(model: nn.Module, job: Job, *, sharded: bool = True, over_weights: bool = False) -> Running:
    """The C++ model from the initial values of `model`, and with `sharded` our runtime and optimizer in C++.
    `over_weights`: gradients are written where the weights lay.
    """
    import ragged_peer

    trainer = ragged_peer.Trainer(
        sizes=dataclasses.asdict(model.config), values=dict(model.named_parameters()), rank=job.rank, world=job.world,
        port=job.port, bf16=job.bf16, lr=LEARNING_RATE, sharded=sharded, over_weights=over_weights)  # fmt: skip
    run = Running(trainer, trainer.forward_backward, trainer.update)
    return run if sharded else cast_floats(run, job)


# --- by the names of catalogue.py -------------------------------------------------------------------------------------

MAKERS: dict[str, Callable[[nn.Module, Job], Running]] = {
    "single": single,
    "single_cpp": functools.partial(native, sharded=False),
    "ddp": ddp,
    "fsdp1": fsdp1,
    "fsdp2": fsdp2,
    "deepspeed": deepspeed_zero3,
    "megatron_v1": megatron_v1,
    "megatron_v2": megatron_v2,
    "ragged_torch_adamw": ragged_python,
    "ragged": functools.partial(ragged_python, own_optimizer=True),
    "ragged_in_place": functools.partial(
        ragged_python, own_optimizer=True, gradients_in_place="same_bits", gradients_over_weights=True),  # fmt: skip
    "ragged_cpp": native,
    "ragged_cpp_over_weights": functools.partial(native, over_weights=True),
}


def prepare_environment() -> None:
    """What systems read from the environment, before any of them is imported."""
    os.environ.update(
        CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu", TORCH_CPP_LOG_LEVEL="ERROR", KINETO_LOG_LEVEL="99")  # fmt: skip
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
