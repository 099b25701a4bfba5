"""Attention under a kernel's mask, written out plainly: the oracle in fp64, the baseline in a low dtype; and inputs."""

from dataclasses import dataclass

import torch

from ringflash_kernels.mask import Mask

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """Sizes other than the mask's."""

    head_dim: int = 64
    num_heads: int = 2
    num_kv_heads: int = 1
    batch: int = 1
    dtype: torch.dtype = torch.bfloat16
    value_dim: int | None = None  # head_dim of v, if it is narrower

    def __str__(self) -> str:
        width = self.head_dim if self.value_dim is None else f"{self.head_dim}/{self.value_dim}"
        return f"{self.batch}x{self.num_heads}/{self.num_kv_heads}x{width}-{str(self.dtype)[6:]}"

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


def inputs(mask: Mask, shape: Shape, *, seed: int = 0, device: str = "cpu") -> tuple[torch.Tensor, ...]:
    """q, k, v, dout with strides as a fused projection leaves them: heads of q, k and v side by side."""
    generator = torch.Generator(device).manual_seed(seed)
    heads = shape.num_heads + 2 * shape.num_kv_heads
    seqlen = max(mask.seqlen_q, mask.seqlen_k)
    fused = torch.randn(shape.batch, seqlen, heads, shape.head_dim, generator=generator, device=device)
    q, k, v = fused.to(shape.dtype).split((shape.num_heads, shape.num_kv_heads, shape.num_kv_heads), 2)
    size = (shape.batch, mask.seqlen_q, shape.num_heads, shape.head_dim)
    dout = torch.randn(size, generator=generator, device=device)
    v, dout = v[:, : mask.seqlen_k, :, : shape.value_dim], dout[..., : shape.value_dim].to(shape.dtype)
    return q[:, : mask.seqlen_q], k[:, : mask.seqlen_k], v, dout.contiguous()


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask | torch.Tensor, scale: float, *,
    dout: torch.Tensor | None = None, dlse: torch.Tensor | None = None,
) -> Tensors:  # fmt: skip
    """out, lse and, given dout, dq, dk, dv in the dtype of q (lse: fp32 at least); empty rows give 0 and -inf.

    Args:
        mask: a kernel's, or (seqlen_q, seqlen_k), true where a key is visible.
    """
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    visible = mask.dense(q.device) if isinstance(mask, Mask) else mask
    seen, group = visible.any(1), q.shape[2] // k.shape[2]
    keys, values = (x.repeat_interleave(group, 2).transpose(1, 2) for x in (k, v))
    state = torch.promote_types(q.dtype, torch.float32)
    hidden = ~visible & seen[:, None]  # rows that see nothing are dropped after the softmax: no NaN gradients
    scores = (q.transpose(1, 2) @ keys.mT * scale).masked_fill(hidden, float("-inf"))
    exact = (q.to(state).transpose(1, 2) @ keys.to(state).mT * scale).masked_fill(hidden, float("-inf"))
    out = (scores.softmax(-1).masked_fill(~seen[:, None], 0) @ values).transpose(1, 2)
    lse = exact.logsumexp(-1)
    result = {"out": out.detach(), "lse": lse.detach().masked_fill(~seen, float("-inf"))}
    if dout is not None:
        objective = (out * dout).sum()
        if dlse is not None:
            objective = objective + (lse * dlse.to(state)).masked_fill(~seen, 0).sum()
        result |= dict(zip(("dq", "dk", "dv"), torch.autograd.grad(objective, (q, k, v)), strict=True))
    return result


def oracle_and_baseline(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask | torch.Tensor, scale: float, **grads: torch.Tensor
) -> tuple[Tensors, Tensors]:
    """The same attention in fp64 and, by plain eager operations, in the dtype of q."""
    exact = attention(q.double(), k.double(), v.double(), mask, scale, **{n: g.double() for n, g in grads.items()})
    return exact, attention(q, k, v, mask, scale, **grads)
