"""Models that every sharding system of the comparison trains: plain PyTorch, nothing distributed, nothing of ours.

A model takes a batch and returns its mean loss; `layers` are the parts that become a unit each. Names, shapes and
arithmetic of `llama` and `moe` are those of the C++ models (ragged/train/llama.h, moe.h), so that one set of initial
values serves both.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import nn


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes; what a kind doesn't have is ignored."""

    kind: str = "llama"
    layers: int = 4
    dim: int = 512
    heads: int = 8
    feed_forward: int = 1408  # of an expert, where there are experts
    vocabulary: int = 4096
    sequence: int = 64
    experts: int = 6
    experts_per_token: int = 2
    adapter_rank: int = 8
    batch: int = 1  # sequences, or rows of the tiny chain, per rank and step


# Small on purpose: with 64 tokens a rank, what remains of a step is copies, collectives and the host.
MODELS = {
    "llama": ModelConfig(),
    "moe": ModelConfig("moe", layers=2, dim=256, feed_forward=512),
    "tiny": ModelConfig("tiny", layers=64, dim=64, batch=8),
    "lora": ModelConfig("lora"),
    "mixed": ModelConfig("mixed"),
}


class RMSNorm(nn.Module):
    """In the dtype of its weight, which may be wider than that of what flows through."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.to(self.weight.dtype), (x.shape[-1],), self.weight, 1e-5).to(x.dtype)


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Turns each pair (i, i + half) of a head by its position. x: [batch, sequence, heads, channels]."""
    half = x.shape[-1] // 2
    exponents = torch.arange(0, x.shape[-1], 2, dtype=torch.float64) / x.shape[-1]
    angles = torch.outer(torch.arange(x.shape[1], dtype=torch.float64), 10000.0**-exponents).unsqueeze(1)
    cosines, sines = angles.cos().float(), angles.sin().float()
    first, second = x[..., :half], x[..., half:]
    turned = torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)
    return turned.to(x.dtype)


class AdaptedLinear(nn.Module):
    """y = W x + B A x with W frozen."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs), requires_grad=False)
        self.lora_a = nn.Parameter(torch.empty(rank, inputs))
        self.lora_b = nn.Parameter(torch.empty(outputs, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight) + F.linear(F.linear(x, self.lora_a), self.lora_b)


def projection(config: ModelConfig, inputs: int, outputs: int) -> nn.Module:
    if config.kind == "lora":
        return AdaptedLinear(inputs, outputs, config.adapter_rank)
    dtype = torch.bfloat16 if config.kind == "mixed" else torch.float32
    return nn.Linear(inputs, outputs, bias=False, dtype=dtype)


class Attention(nn.Module):
    """Causal, rotary positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            projection(config, config.dim, config.dim) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, sequence, dim = x.shape
        q, k, v = (p(x).view(batch, sequence, self.heads, -1) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (t.transpose(1, 2) for t in (rotate(q), rotate(k), v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(attended.transpose(1, 2).reshape(batch, sequence, dim))


class SwiGLU(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = projection(config, config.dim, config.feed_forward)
        self.up_proj = projection(config, config.dim, config.feed_forward)
        self.down_proj = projection(config, config.feed_forward, config.dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    """Which experts take a token, and how much of each it gets."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.chosen = config.experts_per_token
        self.weight = nn.Parameter(torch.empty(config.experts, config.dim))
        self.bias = nn.Parameter(torch.empty(config.experts))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, experts = F.linear(x, self.weight, self.bias).topk(self.chosen, dim=-1)
        return experts, values.softmax(-1, dtype=torch.float32).to(x.dtype)


class Experts(nn.Module):
    """Stacked over dim 0, one matrix product an expert that has tokens."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        count, dim, hidden = config.experts, config.dim, config.feed_forward
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * hidden, dim))
        self.gate_up_proj_bias = nn.Parameter(torch.empty(count, 2 * hidden))
        self.down_proj = nn.Parameter(torch.empty(count, dim, hidden))
        self.down_proj_bias = nn.Parameter(torch.empty(count, dim))

    def forward(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        tokens, choices = experts.shape
        order = experts.flatten().argsort(stable=True)
        repeated = x.unsqueeze(1).expand(tokens, choices, x.shape[1]).reshape(tokens * choices, -1)
        shares = repeated.index_select(0, order).split(
            torch.bincount(experts.flatten(), minlength=self.gate_up_proj.shape[0]).tolist()
        )
        stacks = (self.gate_up_proj, self.gate_up_proj_bias, self.down_proj, self.down_proj_bias)
        outputs = []
        for share, up, up_bias, down, down_bias in zip(shares, *(stack.unbind(0) for stack in stacks), strict=True):
            if share.shape[0]:
                gate, value = F.linear(share, up, up_bias).chunk(2, dim=-1)
                outputs.append(F.linear(F.silu(gate) * value, down, down_bias))
        by_choice = torch.cat(outputs).index_select(0, order.argsort()).reshape(tokens, choices, -1)
        return (by_choice * weights.unsqueeze(-1)).sum(1)


class MoE(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.router, self.experts = Router(config), Experts(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        return self.experts(tokens, *self.router(tokens)).view_as(x)


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = RMSNorm(config.dim), Attention(config)
        self.post_attention_layernorm = RMSNorm(config.dim)
        self.mlp = MoE(config) if config.kind == "moe" else SwiGLU(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """tokens [batch, sequence + 1] -> mean cross-entropy of each token after its predecessors."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.stream = torch.bfloat16 if config.kind == "mixed" else None  # dtype of what flows from layer to layer
        self.embed_tokens = nn.Embedding(config.vocabulary, config.dim)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.dim)
        self.lm_head = projection(config, config.dim, config.vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens[:, :-1])
        x = x.to(self.stream) if self.stream else x
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.lm_head(self.norm(x)).float().flatten(0, 1), tokens[:, 1:].flatten())


class TinyLayer(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.lin = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.lin(x)


class TinyChain(nn.Module):
    """Many units with hardly anything to compute: what a step takes is the framework's own."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.inp = nn.Linear(config.dim, config.dim)
        self.layers = nn.ModuleList(TinyLayer(config.dim) for _ in range(config.layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> None:
    """Norms 1, biases 0, matrices normal and narrow enough that 64 residual layers stay bounded."""
    generator = torch.Generator().manual_seed(seed)
    for name, param in model.named_parameters():
        if name.endswith("bias"):
            param.zero_()
        elif param.ndim == 1:
            param.fill_(1.0)
        else:
            param.copy_(torch.randn(param.shape, generator=generator) * 0.02)


def build(config: ModelConfig, seed: int = 0) -> nn.Module:
    """`config` stays readable as the model's attribute of that name."""
    model = TinyChain(config) if config.kind == "tiny" else Decoder(config)
    model.config = config
    initialise(model, seed)
    if config.kind == "lora":
        for name, param in model.named_parameters():
            param.requires_grad_("lora_" in name)
    return model


def batch(config: ModelConfig, step: int, rank: int, world: int) -> torch.Tensor:
    """The part of a step's global batch that is this rank's."""
    generator = torch.Generator().manual_seed(1000 + step)
    rows = config.batch * world
    if config.kind == "tiny":
        data = torch.randn(rows, config.dim, generator=generator)
    else:
        data = torch.randint(config.vocabulary, (rows, config.sequence + 1), generator=generator)
    return data[rank * config.batch : (rank + 1) * config.batch]
