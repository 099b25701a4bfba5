"""Other implementations than ours, on a GPU: flash2, and fa4 if flash-attn-4 is installed. Both passes against fp64.

Their kernels are others' and are taken to be right; what is tested is how ours calls them: one call for each region of
a mask, states and gradients merged, windows and document bounds in their terms.
"""

from __future__ import annotations

import pytest
import torch

from ringflash.testing.tolerance import assert_close
from ringflash_kernels.api import attention_backward, attention_forward, implementation
from ringflash_kernels.mask import Mask
from tests.helpers.mask_oracle import inputs, oracle_and_baseline
from tests.kernels.test_hopper_forward import HEAD_DIMS, MASKS, shape_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0),
        reason="needs a GPU of compute capability 8.0 or later",
    ),
]

IMPLS = ("flash2", "fa4")
SOME = ("causal, ragged", "causal, rows that see nothing", "window", "documents", "a hop of halves")


def skip_unless_installed(impl: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Any other reason to refuse the call is an error."""
    try:
        implementation(impl, q, k, v)
    except NotImplementedError as error:
        if "without flash-attn-4" not in str(error):
            raise
        pytest.skip(str(error))


def check(impl: str, mask: Mask, *, dlse: bool = True, **sizes: object) -> None:
    shape = shape_of(**sizes)
    q, k, v, dout = inputs(mask, shape, device="cuda")
    skip_unless_installed(impl, q, k, v)
    grads = {"dout": dout}
    if dlse:
        grads["dlse"] = torch.randn(q.shape[0], q.shape[2], q.shape[1], device=q.device)
    exact, baseline = oracle_and_baseline(q, k, v, mask, shape.scale, **grads)
    out, lse = attention_forward(q, k, v, impl=impl, mask=mask)
    found = attention_backward(**grads, q=q, k=k, v=v, out=out, lse=lse, impl=impl, mask=mask)
    got = {"out": out, "lse": lse, **dict(zip(("dq", "dk", "dv"), found, strict=True))}
    assert_close(got, exact, baseline, num_chunks=4)


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
    q, k, v, _ = inputs(whole, shape_of(), device="cuda")
    skip_unless_installed(impl, q, k, v)
    half = whole.seqlen_k // 2
    acc, lse = attention_forward(q, k[:, :half], v[:, :half], impl=impl, out=torch.empty(q.shape, device=q.device))
    out, lse = attention_forward(q, k[:, half:], v[:, half:], impl=impl, acc=acc, lse=lse)
    assert_close({"out": out, "lse": lse}, *oracle_and_baseline(q, k, v, whole, shape_of().scale))
