"""Trains a small Llama on text as bytes, sharded: what `ragged train` does, as one Python file to read and to change.

    torchrun --nproc-per-node 4 examples/train_llama.py configs/demo.toml
    torchrun --nproc-per-node 4 examples/train_llama.py configs/demo.toml --train.steps=20 --run.dir=runs/mine
    torchrun --nproc-per-node 4 examples/train_llama.py configs/demo.toml --stock    # torch's FSDP2 instead of ours
    torchrun --nproc-per-node 4 examples/train_llama.py configs/demo.toml --optimizer adamw8bit

It reads the configuration files of `ragged train`, and starts from the same values, takes the same batches and follows
the same schedule, so the losses agree to rounding. Gloo on CPUs, NCCL where there are CUDA devices. What it isn't: a
trainer to build on. It saves no checkpoints, writes no sample of text, and checks its input less.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import math
import os
import pathlib
import sys
import sysconfig
import time
import tomllib
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule as StockFSDPModule
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

import ragged_fsdp
import ragged_fsdp.optim

# ---- the model: plain PyTorch, with Hugging Face's names; it knows nothing of ranks ----------------------------------
#
# B: batch, T: sequence, D: dim, H: heads, K: key and value heads, E: D / H


@functools.cache
def rotary_table(sequence: int, head_dim: int, theta: float, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, each [T, 1, E/2]. Made in float64 on the CPU, so that every device gets the same bits."""
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(sequence, dtype=torch.float64), frequencies).unsqueeze(1)
    return angles.cos().float().to(device), angles.sin().float().to(device)


def rotate(x: torch.Tensor, theta: float) -> torch.Tensor:
    """Turns each pair (i, i + E/2) of a head by its position. [B, T, heads, E] -> same, computed in float32."""
    cosines, sines = rotary_table(x.size(1), x.size(-1), theta, x.device)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.head_dim, self.theta = config.dim // config.heads, config.rope_theta
        self.is_grouped = config.kv_heads != config.heads
        kv_dim = config.kv_heads * self.head_dim
        self.q_proj = nn.Linear(config.dim, config.dim, bias=False)
        self.k_proj = nn.Linear(config.dim, kv_dim, bias=False)
        self.v_proj = nn.Linear(config.dim, kv_dim, bias=False)
        self.o_proj = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        by_head = [proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj)]
        q, k, v = rotate(by_head[0], self.theta), rotate(by_head[1], self.theta), by_head[2]
        attended = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=self.is_grouped
        )
        return self.o_proj(attended.transpose(1, 2).flatten(2))


class SwiGlu(nn.Module):
    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.dim, config.feed_forward, bias=False)
        self.up_proj = nn.Linear(config.dim, config.feed_forward, bias=False)
        self.down_proj = nn.Linear(config.feed_forward, config.dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.mlp = SwiGlu(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x + self.self_attn(self.input_layernorm(x))
        return h + self.mlp(self.post_attention_layernorm(h))


class Llama(nn.Module):
    def __init__(self, config: SimpleNamespace, activation_checkpointing: bool = False) -> None:
        super().__init__()
        self.activation_checkpointing = activation_checkpointing
        self.embed_tokens = nn.Embedding(config.vocabulary, config.dim)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.lm_head = nn.Linear(config.dim, config.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[B, T] int64 -> logits [B, T, vocabulary]."""
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.activation_checkpointing else layer(x)
        return self.lm_head(self.norm(x))


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    """In nats a token; in float32 whatever the layers compute in, since it adds many small terms."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction=reduction)


# ---- sharding: the part that this example is about -------------------------------------------------------------------


def shard(
    model: Llama, config: SimpleNamespace, mesh: DeviceMesh, dtype: torch.dtype, stock: bool, optimizer: str
) -> None:
    """A unit a layer; embedding, last norm and head are the root's own. The same calls for torch's FSDP2 and for ours,
    which takes a wish for blocks that stay on one rank besides: 8-bit states come in tiles that no border may cut."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=DTYPES[config.train.reduce_dtype])
    fully_shard = torch.distributed.fsdp.fully_shard if stock else ragged_fsdp.fully_shard
    if optimizer == "adamw8bit":
        fully_shard = functools.partial(fully_shard, shard_policy=ragged_fsdp.optim.tile_rows)
    elif config.parallel.rows and not stock:
        fully_shard = functools.partial(fully_shard, shard_policy=ragged_fsdp.rows(config.parallel.rows))
    for layer in model.layers:
        fully_shard(
            layer, mesh=mesh, mp_policy=policy, reshard_after_forward=config.parallel.reshard_after_forward
        )
    fully_shard(model, mesh=mesh, mp_policy=policy)


@torch.no_grad()
def initialise(model: Llama, config: SimpleNamespace) -> None:
    """Norms start at 1, matrices normal, those that write to the residual stream sqrt(2 layers) smaller. Values depend
    on the seed, the parameter's name and the element's index, not on who holds it; no rank ever holds the whole model.
    """
    residual_std = config.model.init_std / math.sqrt(2.0 * config.model.layers)
    for name, param in model.named_parameters():
        writes_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        std = residual_std if writes_residual else config.model.init_std
        kind, a, b = ("constant", 1.0, 0.0) if param.ndim == 1 else ("normal", 0.0, std)
        values = ragged_fsdp.initial_values(kind, a, b, config.train.seed, name, 0, param.numel()).view(param.shape)
        # src_data_rank=None: every rank cuts its piece from the same values, nothing travels.
        mesh, placements = param.device_mesh, param.placements
        param.copy_(ragged_fsdp.distribute_tensor(values.to(param.device), mesh, placements, src_data_rank=None))


def make_optimizer(model: Llama, config: SimpleNamespace, name: str) -> torch.optim.Optimizer:
    """Any of torch's, since parameters are DTensors, or one that knows how they are cut. Norms aren't pulled towards
    zero."""
    lr, betas, eps = config.train.lr, tuple(config.optimizer.betas), config.optimizer.eps
    if name in ("muon", "soap"):  # hidden matrices; the rest gets AdamW in the same step and at the same rate
        groups = ragged_fsdp.optim.matrix_groups(model.named_parameters())
        options = {"lr": lr, "weight_decay": config.optimizer.weight_decay, "adamw_betas": betas, "adamw_eps": eps}
        if name == "soap":
            return ragged_fsdp.optim.SOAP(groups, betas=betas, eps=eps, **options)
        return ragged_fsdp.optim.Muon(groups, adjust_lr_fn="match_rms_adamw", **options)
    params = list(model.named_parameters())
    groups = [
        {"params": [(name, p) for name, p in params if p.ndim >= 2], "weight_decay": config.optimizer.weight_decay},
        {"params": [(name, p) for name, p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    makers = {
        "stock": functools.partial(torch.optim.AdamW, fused=True),
        "adamw": ragged_fsdp.optim.AdamW,
        "adamw8bit": ragged_fsdp.optim.AdamW8bit,
    }
    return makers[name](groups, lr=lr, betas=betas, eps=eps)


# ---- data: bytes of text; a batch is a function of its position alone ------------------------------------------------


def load_text(config: SimpleNamespace) -> tuple[torch.Tensor, torch.Tensor]:
    """(for training, for validation), 1-D uint8: a file's last 1/holdout, or every holdout-th of a folder's files, is
    kept for validation. "python-stdlib" is the source of the Python standard library without its tests."""
    path, skipped = pathlib.Path(config.path), set()
    if config.path == "python-stdlib":
        path = pathlib.Path(sysconfig.get_path("stdlib"))
        skipped = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    if path.is_file():
        text = path.read_bytes()[: config.max_bytes]
        kept = len(text) - len(text) // config.holdout
        parts = [bytearray(text[:kept]), bytearray(text[kept:])]
    else:
        files = []
        for folder, folders, names in os.walk(path):
            folders[:] = [name for name in folders if name not in skipped]
            files += [pathlib.Path(folder, name) for name in names]
        files = [file for file in files if not config.extensions or file.suffix in config.extensions]
        files.sort(key=lambda file: os.fsencode(file.relative_to(path)))
        parts = [bytearray(), bytearray()]
        left = config.max_bytes
        for number, file in enumerate(files):
            text = file.read_bytes()[:left]
            parts[number % config.holdout == config.holdout // 2] += text
            left -= len(text)
            if left == 0:
                break
    if not all(parts):
        raise SystemExit(f"Expected text to train on and some to validate with, but '{path}' has too little.")
    return torch.frombuffer(parts[0], dtype=torch.uint8), torch.frombuffer(parts[1], dtype=torch.uint8)


def mix(value: int) -> int:
    """The finaliser of SplitMix64 (Steele et al., OOPSLA 2014)."""
    word = (1 << 64) - 1
    value = (value + 0x9E3779B97F4A7C15) & word
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & word
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & word
    return value ^ (value >> 31)


def cut(text: torch.Tensor, sequence: int, offsets: list[int], device: torch.device) -> tuple[torch.Tensor, ...]:
    """(tokens, the token after each), [B, T] int64."""
    rows = torch.stack([text[offset : offset + sequence + 1] for offset in offsets]).long().to(device)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def training_offsets(size: int, sequence: int, seed: int, step: int, first: int, count: int) -> list[int]:
    """Where sequences first .. first + count - 1 of a step's global batch begin."""
    numbers = range(first, first + count)
    return [mix(mix(mix(seed) ^ step) ^ number) % (size - sequence) for number in numbers]


def learning_rate(config: SimpleNamespace, step: int) -> float:
    """Linear warm-up, then a cosine down to min_lr_ratio of the peak."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    progress = min(1.0, (step - config.warmup + 1) / max(1, config.steps - config.warmup))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress)))


@torch.no_grad()
def validation_loss(model: Llama, text: torch.Tensor, config: SimpleNamespace, device: torch.device) -> float:
    """Over eval.sequences sequences that are spread evenly over the text, all ranks together."""
    total, sequence, batch = config.eval.sequences, config.train.sequence, config.train.batch
    last_offset = len(text) - sequence - 1
    loss = torch.zeros((), dtype=torch.float64, device=device)
    # Every rank runs as many forwards as the others, since each gathers; what is past the end doesn't count.
    for first in range(dist.get_rank() * batch, total + dist.get_rank() * batch, dist.get_world_size() * batch):
        numbers = range(first, first + batch)
        offsets = [last_offset * (number % total) // (total - 1) if total > 1 else 0 for number in numbers]
        tokens, targets = cut(text, sequence, offsets, device)
        logits = model(tokens)
        counting = min(max(total - first, 0), batch)
        if counting:
            loss += cross_entropy(logits[:counting], targets[:counting], reduction="sum")
    for module in model.modules():  # without a backward nothing frees what forward gathered
        if isinstance(module, (ragged_fsdp.FSDPModule, StockFSDPModule)):
            module.reshard()
    dist.all_reduce(loss)
    return loss.item() / (total * sequence)


# ---- the run ---------------------------------------------------------------------------------------------------------


def train(config: SimpleNamespace, stock: bool, optimizer_name: str) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    say = print if rank == 0 else lambda *args, **kwargs: None
    run, batch, sequence = config.train, config.train.batch, config.train.sequence
    text, held_out = load_text(config.data)

    # The model takes no memory until it is sharded.
    with torch.device("meta"):
        model = Llama(config.model, run.activation_checkpointing)
    parameters = sum(param.numel() for param in model.parameters())
    dtype = compute_dtype(run.param_dtype, device)
    shard(model, config, make_mesh(config.parallel, world, device), dtype, stock, optimizer_name)
    model.to_empty(device=device)
    initialise(model, config)
    optimizer = make_optimizer(model, config, optimizer_name)
    clip = torch.nn.utils.clip_grad_norm_ if stock else ragged_fsdp.clip_grad_norm_

    say(f"{parameters} parameters on {world} ranks ({device.type}), computing in {str(dtype).removeprefix('torch.')}")
    if not stock:
        say(ragged_fsdp.summary(model))
    say(f"validation loss before training: {validation_loss(model, held_out, config, device):.4f}")

    with contextlib.ExitStack() as stack:
        log = None
        if rank == 0 and config.run.dir:
            pathlib.Path(config.run.dir).mkdir(parents=True, exist_ok=True)
            log = stack.enter_context(open(pathlib.Path(config.run.dir, "metrics.jsonl"), "w", encoding="utf-8"))
        for step in range(run.steps):
            before = None if stock else measure(model)
            start = time.perf_counter()

            # Forward and backward, a micro-batch after the other. Gradients add up and are reduced in the last one.
            loss = torch.zeros((), dtype=torch.float64, device=device)
            for micro in range(run.accumulate):
                model.set_requires_gradient_sync(run.sync_each_micro_batch or micro == run.accumulate - 1)
                first = (rank * run.accumulate + micro) * batch
                offsets = training_offsets(len(text), sequence, run.seed, step, first, batch)
                tokens, targets = cut(text, sequence, offsets, device)
                part = cross_entropy(model(tokens), targets) / run.accumulate
                part.backward()
                loss += part.detach()
            dist.all_reduce(loss, op=dist.ReduceOp.SUM)

            # Update.
            norm = clip(model.parameters(), run.clip)
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(run, step)
            optimizer.step()
            optimizer.zero_grad()

            # Report. The clock stops before validation.
            metrics = {"step": step + 1, "loss": loss.item() / world, "grad_norm": norm.item()}
            metrics["lr"] = learning_rate(run, step)
            seconds = time.perf_counter() - start
            metrics["tokens_per_s"] = world * batch * run.accumulate * sequence / seconds
            metrics["step_ms"] = 1000.0 * seconds
            after = None if stock else measure(model, reset=False)
            is_due = config.eval.every > 0 and (step + 1) % config.eval.every == 0
            if step == 0 or is_due or step == run.steps - 1:
                metrics["val_loss"] = validation_loss(model, held_out, config, device)
            if "val_loss" in metrics or (step + 1) % run.log_every == 0:
                say(console_line(metrics, run.steps))
            if log:
                print(json.dumps(metrics), file=log, flush=True)

    if before and after:
        say(planned_and_measured(ragged_fsdp.forecast(model, run.accumulate, run.sync_each_micro_batch), before, after))


def console_line(metrics: dict[str, float], steps: int) -> str:
    line = (
        f"step {metrics['step']:>{len(str(steps))}}/{steps}  loss {metrics['loss']:.4f}  "
        f"norm {metrics['grad_norm']:.3f}  lr {metrics['lr']:.2e}  {metrics['tokens_per_s']:>6.0f} tok/s  "
        f"{metrics['step_ms']:>5.0f} ms"
    )
    return line + (f"  val {metrics['val_loss']:.4f}" if "val_loss" in metrics else "")


def measure(model: nn.Module, reset: bool = True) -> dict[str, float]:
    """The counters as they stand; a step is the difference of two readings, and peaks begin anew with the first."""
    if reset:
        ragged_fsdp.reset_peaks(model)
    return ragged_fsdp.stats(model)


def planned_and_measured(forecast: dict[str, int], before: dict[str, float], after: dict[str, float]) -> str:
    """What the layout said of a step before any ran, beside what the last one did, on this rank."""
    step = {key: after[key] - before[key] for key in after} | {"peak_image_bytes": after["peak_image_bytes"]}
    rows = [
        ("gathered", forecast["gathered_bytes"], step["gathered_bytes"]),
        ("reduced", forecast["reduced_bytes"], step["reduced_bytes"]),
        ("masters cast", forecast["cast_in"], step["cast_in"]),
        ("gradients, cast or in place", forecast["cast_grad"], step["cast_grad"] + step["in_place"]),
        ("copied", forecast["copied"], step["copied"]),
        ("peak of unsharded images", forecast["peak_image_bytes"], step["peak_image_bytes"]),
    ]
    lines = [f"\n{'bytes of one step on this rank':<34}{'planned':>16}{'measured':>16}"]
    for name, planned, measured in rows:
        lines.append(f"  {name:<32}{planned:>16,}{measured:>16,}  {'equal' if planned == measured else 'DIFFERS'}")
    return "\n".join(lines)


# ---- configuration ---------------------------------------------------------------------------------------------------

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

# The keys of `ragged train --help` that mean something here, with their defaults.
DEFAULTS = {
    "model": {
        "dim": 256, "layers": 4, "heads": 4, "kv_heads": 2, "feed_forward": 688, "vocabulary": 256,
        "rope_theta": 10000.0, "norm_eps": 1e-5, "init_std": 0.02,
    },
    "data": {"path": "python-stdlib", "extensions": [".py"], "max_bytes": 32 << 20, "holdout": 20},
    "train": {
        "steps": 100, "batch": 4, "sequence": 128, "accumulate": 1, "sync_each_micro_batch": False, "warmup": 10,
        "lr": 3e-3, "min_lr_ratio": 0.1, "clip": 1.0, "seed": 1, "param_dtype": "auto", "reduce_dtype": "fp32",
        "activation_checkpointing": False, "log_every": 1,
    },
    "optimizer": {"betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
    "parallel": {"replicate": 1, "reshard_after_forward": True, "rows": 0},
    "eval": {"every": 0, "sequences": 64},
    "run": {"dir": "", "device": "auto"},
}  # fmt: skip
ONLY_FOR_RAGGED_TRAIN = {"eval.sample_bytes", "eval.temperature"}


def read_config(path: str | None, overrides: list[str]) -> SimpleNamespace:
    """A TOML file, then --section.key=value in order."""
    config = {section: dict(defaults) for section, defaults in DEFAULTS.items()}
    given = tomllib.loads(pathlib.Path(path).read_text(encoding="utf-8")) if path else {}
    pairs = [(f"{section}.{key}", value) for section, keys in given.items() for key, value in keys.items()]
    for override in overrides:
        key, equals, value = override.removeprefix("--").partition("=")
        if not override.startswith("--") or not equals:
            raise SystemExit(f"Expected --section.key=value, but got {override!r}.")
        try:
            pairs.append((key, tomllib.loads(f"value = {value}")["value"]))
        except tomllib.TOMLDecodeError:  # a word without quotes
            pairs.append((key, value))
    for name, value in pairs:
        section, _, key = name.partition(".")
        if key in config.get(section, {}):
            config[section][key] = value
        elif name not in ONLY_FOR_RAGGED_TRAIN:
            raise SystemExit(f"Expected a key that this example knows (see DEFAULTS), but got '{name}'.")
    return SimpleNamespace(**{section: SimpleNamespace(**keys) for section, keys in config.items()})


def make_mesh(config: SimpleNamespace, world: int, device: torch.device) -> DeviceMesh:
    """All ranks shard one copy, or `replicate` groups of ranks a copy each."""
    if world % config.replicate:
        raise SystemExit(f"Expected parallel.replicate to divide the {world} ranks, but got {config.replicate}.")
    if config.replicate == 1:
        return init_device_mesh(device.type, (world,))
    shape = (config.replicate, world // config.replicate)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


def compute_dtype(setting: str, device: torch.device) -> torch.dtype:
    """bf16 where the hardware computes in it; other CPUs emulate it, slowly."""
    if setting != "auto":
        return DTYPES[setting]
    cpu_info = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    has_bf16 = device.type == "cuda" or "amx_bf16" in cpu_info or "avx512_bf16" in cpu_info
    return torch.bfloat16 if has_bf16 else torch.float32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", help="a TOML file as for `ragged train`; default: the defaults")
    parser.add_argument("--stock", action="store_true", help="shard with torch.distributed.fsdp instead")
    optimizers = ("stock", "adamw", "adamw8bit", "muon", "soap")
    parser.add_argument("--optimizer", choices=optimizers, default="stock", help="torch's AdamW, or one of ours")
    args, overrides = parser.parse_known_args()
    if args.stock and args.optimizer == "adamw8bit":
        parser.error("--optimizer adamw8bit needs shards that cut no tile: leave --stock out")
    config = read_config(args.config, overrides)

    on_cuda = config.run.device != "cpu" and torch.cuda.is_available()
    if on_cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if "RANK" not in os.environ:  # started without torchrun: one rank
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    dist.init_process_group("nccl" if on_cuda else "gloo")
    try:
        train(config, args.stock, args.optimizer)
        dist.barrier()  # a rank that leaves early would fail the others' last collectives
    finally:
        dist.destroy_process_group()
    # Gloo's threads let go of a collective's tensors some time after it is done; were Python being torn down by then, the
    # process would abort. They are joined with the group, and the group goes with the last module that holds it.
    gc.collect()
    if args.stock:  # there torch's caches hold the group for good, so leave without tearing Python down
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
