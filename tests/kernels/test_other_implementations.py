"""Other implementations than ours, on a GPU: flash2, and fa4 if flash-attn-4 is installed. Both passes against fp64.

Their kernels are others' and are taken to be right; what is tested is how ours calls them: one call for each region of
a mask, states and gradients merged, windows and document bounds in their terms.
"""

from __future__ import annotations

import pytest
import torch

from ringflash_kernels.api import attention_backward, attention_forward, implementation
from ringflash_kernels.mask import Mask
from tests.helpers.tolerance import assert_close
from tests.kernels.test_hopper_forward import HEAD_DIMS, MASKS, eager, inputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0),
        reason="needs a GPU of compute capability 8.0 or later",
    ),
]

IMPLS = ("flash2", "fa4")
SOME = ("causal, ragged", "causal, rows that see nothing", "window", "documents", "a hop of halves")
Tensors = dict[str, torch.Tensor]


def both_passes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, dout: torch.Tensor,
                dlse: torch.Tensor) -> tuple[Tensors, Tensors]:  # fmt: skip
    """Results and gradients of plain attention."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    found = eager(*leaves, visible=visible)
    seen = visible.any(1)
    loss = (found["out"] * dout.to(q.dtype)).sum() + (found["lse"].masked_fill(~seen, 0.0) * dlse).sum()
    gradients = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(loss, leaves), strict=True))
    return {name: x.detach() for name, x in found.items()}, gradients


def skip_unless_installed(impl: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Any other reason to refuse the call is an error."""
    try:
        implementation(impl, q, k, v)
    except NotImplementedError as error:
        if "without flash-attn-4" not in str(error):
            raise
        pytest.skip(str(error))


def check(impl: str, mask: Mask, *, dlse: bool = True, **heads: object) -> None:
    """One call of each pass."""
    q, k, v = inputs(mask, **heads)
    skip_unless_installed(impl, q, k, v)
    dout = torch.randn(q.shape, device=q.device).to(q.dtype)
    lse_gradient = torch.randn(q.shape[0], q.shape[2], q.shape[1], device=q.device) * dlse
    visible = mask.dense(q.device)
    exact, exact_gradients = both_passes(
        *(x.double() for x in (q, k, v)), visible=visible, dout=dout, dlse=lse_gradient
    )
    baseline, baseline_gradients = both_passes(q, k, v, visible, dout, lse_gradient)
    out, lse = attention_forward(q, k, v, impl=impl, mask=mask)
    assert_close({"out": out, "lse": lse}, exact, baseline, num_chunks=4)
    given = {"dlse": lse_gradient} if dlse else {}
    gradients = attention_backward(dout, q, k, v, out, lse, impl=impl, mask=mask, **given)
    assert_close(
        dict(zip(("dq", "dk", "dv"), gradients, strict=True)), exact_gradients, baseline_gradients, num_chunks=4
    )


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", [name for name in MASKS if name != "nothing"])
def test_masks(impl: str, name: str) -> None:
    packed = "documents" in name  # one sequence, not a batch
    check(impl, MASKS[name], batch=1 if packed else 2)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("head_dim", [head_dim for head_dim in HEAD_DIMS if head_dim != 128])
@pytest.mark.parametrize("name", ["causal, ragged", "full, ragged"])
def test_head_dims(impl: str, head_dim: int, name: str) -> None:
    check(impl, MASKS[name], head_dim=head_dim)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", SOME)
def test_half_precision(impl: str, name: str) -> None:
    check(impl, MASKS[name], dtype=torch.float16, batch=1, dlse=False)


@pytest.mark.parametrize("impl", IMPLS)
def test_state_of_other_keys(impl: str) -> None:
    """Two calls over two sets of keys are one over both."""
    whole = MASKS["full"]
    q, k, v = inputs(whole)
    skip_unless_installed(impl, q, k, v)
    half = whole.seqlen_k // 2
    acc, lse = attention_forward(q, k[:, :half], v[:, :half], impl=impl, out=torch.empty(q.shape, device=q.device))
    out, lse = attention_forward(q, k[:, half:], v[:, half:], impl=impl, acc=acc, lse=lse)
    visible = whole.dense(q.device)
    assert_close({"out": out, "lse": lse}, eager(q.double(), k.double(), v.double(), visible), eager(q, k, v, visible))
