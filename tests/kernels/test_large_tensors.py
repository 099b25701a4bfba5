"""A million tokens of 33 heads, more than 2**32 elements a tensor: both passes, sampled against fp64.

Needs a GPU of compute capability 9.0 with 110 GiB. A causal window keeps the work small, so that what is tested is
addresses: of q, k, v and dout, of every result, and of the fp32 dQ.
"""

from __future__ import annotations

import pytest
import torch

from ringflash.testing import dense
from ringflash.testing.tolerance import assert_close
from ringflash_kernels.api import attention_backward, attention_forward

NEEDED_BYTES = 110 << 30
WINDOW = (511, 0)
BLOCK = 256

Tensors = dict[str, torch.Tensor]


def is_roomy() -> bool:
    """Return whether the tensors fit."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return False
    return torch.cuda.get_device_properties().total_memory >= NEEDED_BYTES


def both_passes(impl: str, inputs: Tensors) -> Tensors:
    """out, lse, dq, dk and dv."""
    q, k, v, dout = inputs.values()
    out, lse = attention_forward(q, k, v, impl=impl, causal=True, window_size=WINDOW)
    grads = attention_backward(dout, q, k, v, out, lse, impl=impl, causal=True, window_size=WINDOW)
    return {"out": out, "lse": lse, **dict(zip(("dq", "dk", "dv"), grads, strict=True))}


def check(impl: str, inputs: Tensors) -> None:
    """Everything is finite; the first, a middle and the last block of the first and the last head are right."""
    found = both_passes(impl, inputs)
    for name, x in found.items():
        assert x.isfinite().all(), name
    _, seqlen, num_heads, _ = inputs["q"].shape
    for head in (0, num_heads - 1):
        for start in (0, seqlen // 2 + 77, seqlen - BLOCK):
            check_block(inputs, found, head, start)


def check_block(inputs: Tensors, found: Tensors, head: int, start: int) -> None:
    """Rows and keys [start, start + BLOCK), from as many before and after as reach into it."""
    first, stop = max(0, start - WINDOW[0]), start + BLOCK + WINDOW[0]
    mine = slice(start - first, start - first + BLOCK)

    def right(dtype: torch.dtype) -> Tensors:
        near = (x[:, first:stop, head : head + 1].to(dtype) for x in inputs.values())
        return block_of(dense.attention(*near, causal=True, window_size=WINDOW), mine)

    whole = {name: x[:, head : head + 1] if name == "lse" else x[:, :, head : head + 1] for name, x in found.items()}
    got = block_of(whole, slice(start, start + BLOCK))
    assert_close(got, right(torch.float64), right(inputs["q"].dtype))


def block_of(tensors: Tensors, rows: slice) -> Tensors:
    """The rows of each."""
    return {name: x[..., rows] if name == "lse" else x[:, rows] for name, x in tensors.items()}


def draw(seqlen: int, num_heads: int, head_dim: int, device: str) -> Tensors:
    """Random normal, in place: copies would not fit."""
    torch.manual_seed(0)
    shape = (1, seqlen, num_heads, head_dim)
    names = ("q", "k", "v", "dout")
    return {name: torch.empty(shape, dtype=torch.bfloat16, device=device).normal_() for name in names}


@pytest.mark.gpu
@pytest.mark.skipif(not is_roomy(), reason="needs a GPU of compute capability 9.0 with 110 GiB")
def test_more_than_32_bits_of_elements() -> None:
    check("hopper", draw(1 << 20, 33, 128, "cuda"))


def test_a_wrong_block_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check itself, small and on the CPU: right results pass, those of a head that was addressed wrongly do not."""
    inputs = draw(2048, 3, 16, "cpu")
    check("reference", inputs)
    for name in ("out", "lse", "dq", "dk", "dv"):
        found = both_passes("reference", inputs)
        heads = 1 if name == "lse" else 2
        found[name] = found[name].roll(1, heads)
        monkeypatch.setattr(f"{__name__}.both_passes", lambda *_, wrong=found: wrong)
        with pytest.raises(AssertionError, match=f"{name} of chunk"):
            check("reference", inputs)
        monkeypatch.undo()
