"""Small models of the tests of `fully_shard`: odd sizes, the structures that FSDP meets. No test, nothing
distributed.
"""

import torch
import torch.nn.functional as F
from torch import nn


class MLP(nn.Module):
    """Two linears around a ReLU; a buffer on request."""

    def __init__(self, dim=8, factor=4, bias=True, buffer=False):
        super().__init__()
        self.up = nn.Linear(dim, factor * dim, bias=bias)
        self.down = nn.Linear(factor * dim, dim, bias=bias)
        if buffer:
            self.register_buffer("offset", torch.randn(dim))

    def forward(self, x):
        y = self.down(F.relu(self.up(x)))
        return y + self.offset if hasattr(self, "offset") else y

    def reset_parameters(self):
        if hasattr(self, "offset"):
            nn.init.normal_(self.offset)


def stack(count=3, dim=8, **options):
    return nn.Sequential(*[MLP(dim, **options) for _ in range(count)])


class Block(nn.Module):
    """Pre-norm attention and feed-forward."""

    def __init__(self, dim, heads, dropout=0.0):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.ffn = MLP(dim, 3)

    def forward(self, x):
        b, s, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, s, d))
        return x + F.dropout(self.ffn(self.norm2(x)), self.dropout, self.training)


class TinyLM(nn.Module):
    """Token embedding, blocks, norm, head; `tied` shares embedding and head."""

    def __init__(self, vocab=29, dim=12, heads=3, layers=2, tied=False):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_token_loss(model, ids):
    return F.cross_entropy(model(ids[:, :-1]).float().flatten(0, 1), ids[:, 1:].flatten())


class Adapted(nn.Module):
    """A frozen linear beside a trained one of rank 2."""

    def __init__(self):
        super().__init__()
        self.base, self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


class TwoHeads(nn.Module):
    """Two linears over one input: both outputs returned, or only the first used."""

    def __init__(self, dim=8, second=True):
        super().__init__()
        self.first, self.second = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.relu, self.use_second = nn.ReLU(), second

    def forward(self, x):
        if self.use_second:
            return self.relu(self.first(x)), self.relu(self.second(x))
        return self.relu(self.first(x))


class Mixer(nn.Module):
    """Matrices large enough for 8 bits, whose rows end inside a tile; a stack, a frozen matrix, a tie and an
    embedding."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 72)
        self.up, self.down = nn.Linear(72, 104), nn.Linear(104, 72)
        self.experts = nn.Parameter(0.1 * torch.randn(3, 40, 72))
        self.frozen = nn.Linear(72, 72, bias=False).requires_grad_(False)
        self.idle = nn.Linear(72, 72)
        self.head = nn.Linear(72, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        x = self.down(torch.relu(self.up(x))) + self.frozen(x)
        x = x + torch.tanh(x @ self.experts.sum(0).T) @ self.experts[1]
        return self.head(x)
