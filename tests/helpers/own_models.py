"""Small models as users write them, for wrapping: each takes tokens and their positions, and returns logits."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ringflash
from ringflash.comm.seeding import seeded
from tests.helpers.pool import Context

VOCAB, WIDTH, HEADS, LENGTH = 31, 16, 4, 32


class Attention(nn.Module):
    """Self-attention by scaled_dot_product_attention; `options` are passed to it. `broken` breaks compiled graphs."""

    def __init__(self, kv_heads: int = HEADS, rotary: bool = False, broken: bool = False, **options: object) -> None:
        super().__init__()
        self.kv_heads, self.rotary, self.broken, self.options = kv_heads, rotary, broken, options
        self.q = nn.Linear(WIDTH, WIDTH)
        self.kv = nn.Linear(WIDTH, 2 * kv_heads * WIDTH // HEADS)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        q, k, v = self.project(x, positions)
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))

    def project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(batch, heads, seqlen, head_dim)."""
        q = self.q(x).view(*x.shape[:2], HEADS, -1).transpose(1, 2)
        k, v = self.kv(x).view(*x.shape[:2], 2, self.kv_heads, -1).permute(2, 0, 3, 1, 4)
        if self.broken:
            torch._dynamo.graph_break()
        return (rotate(q, positions), rotate(k, positions), v) if self.rotary else (q, k, v)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, **self.options)


class Bound(Attention):
    """The same by `ringflash.RingAttention`."""

    def __init__(self) -> None:
        super().__init__()
        self.ring = ringflash.RingAttention(None)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.ring(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


class Latent(Attention):
    """With values of fewer features than keys."""

    def __init__(self) -> None:
        super().__init__(is_causal=True)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.pad(super().attend(q, k, v[..., 1:]), (0, 1))


class Partly(Attention):
    """Compiles the function that attends, not the layer."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _compiled(q, k, v)


@torch.compile(backend="aot_eager")
def _compiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(1.5 * q, k, v, is_causal=True) + v


class Block(nn.Module):
    """A layer, run again in the backward where `reentrant` says how."""

    def __init__(self, attn: Attention, reentrant: bool | None) -> None:
        super().__init__()
        self.attn, self.mlp, self.reentrant = attn, nn.Linear(WIDTH, WIDTH), reentrant
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        if self.reentrant is None:
            x = x + self.attn(self.norm(x), positions)
        else:
            x = x + checkpoint(self.attn, self.norm(x), positions, use_reentrant=self.reentrant)
        return x + F.gelu(self.mlp(x))


class Model(nn.Module):
    """Embedding, learned positions, two layers, head."""

    def __init__(self, make=Attention, reentrant: bool | None = None, **options: object) -> None:  # type: ignore[no-untyped-def]
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.positions = nn.Embedding(LENGTH * 4, WIDTH)
        self.blocks = nn.ModuleList(Block(make(**options), reentrant) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x, positions)
        return self.head(x)


class Choosing(Block):
    """A layer with a list of experts: the second is for tokens in the middle half, which one of two ranks holds.

    Nothing uses the third.
    """

    def __init__(self) -> None:
        super().__init__(Attention(is_causal=True), None)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return choose(self.experts, super().forward(x, positions), positions)


def choose(experts: nn.ModuleList, x: Tensor, positions: Tensor) -> Tensor:
    """Add to each token what its expert makes of it; an expert without tokens is not called."""
    y = torch.zeros_like(x)
    for i, expert in enumerate(experts):
        chosen = ((2 * positions + 1 - 4 * LENGTH).abs() < 2 * LENGTH) == i
        if chosen.any():
            y[:, chosen] = expert(x[:, chosen])
    return x + y


class Misplaced(Model):
    """The planted error: positions counted from the start of the shard."""

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return super().forward(tokens, torch.arange(tokens.shape[1]))


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of (batch, heads, seqlen, head_dim) by (seqlen,) positions."""
    half = x.shape[-1] // 2
    angle = positions[:, None] * 100.0 ** -(torch.arange(half, dtype=x.dtype) / half)
    left, right = x.chunk(2, -1)
    return torch.cat([left * angle.cos() - right * angle.sin(), left * angle.sin() + right * angle.cos()], -1)


def build(kind, **options: object) -> nn.Module:  # type: ignore[no-untyped-def]
    """A model in fp64 with the same parameters on every call."""
    with seeded(0):
        return kind(**options).double()


def tokens(batch: int = 2) -> Tensor:
    """The whole sequences."""
    return torch.randint(0, VOCAB, (batch, LENGTH), generator=torch.Generator().manual_seed(1))


def shard(ctx: Context) -> tuple[Tensor, Tensor]:
    """A rank's part of the whole sequences, and its positions."""
    return ringflash.shard_sequence(tokens(), ctx.group), ringflash.local_positions(LENGTH, ctx.size, ctx.rank)
