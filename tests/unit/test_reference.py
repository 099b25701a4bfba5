"""The reference implementation against torch's attention and plain fp64 autograd. CPU, one process."""

from typing import Any
from unittest import mock

import pytest
import torch

from ringflash.testing import dense
from ringflash.testing.tolerance import assert_close
from ringflash_kernels import Mask, Region, attention_backward, attention_forward, begin_backward, flash4, reference
from ringflash_kernels.api import keys_in_pieces

MASKS: dict[str, dict[str, Any]] = {
    "full": {"causal": False},
    "causal": {"causal": True},
    "window": {"causal": False, "window_size": (3, 2)},
    "causal_window": {"causal": True, "window_size": (4, -1)},
}


def draw(num_heads: int = 4, num_kv_heads: int = 2) -> tuple:
    """q, k, v, dout, dlse."""
    generator = torch.Generator().manual_seed(12)
    shapes = [(2, 12, n, 16) for n in (num_heads, num_kv_heads, num_kv_heads, num_heads)]
    return tuple(torch.randn(x, generator=generator, dtype=torch.float64) for x in [*shapes, (2, num_heads, 12)])


def gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, **options: Any) -> dict:
    """out, lse, dq, dk, dv by the one-device interface."""
    dlse = options.pop("dlse", None)
    out, lse = attention_forward(q, k, v, impl="reference", **options)
    dq, dk, dv = attention_backward(dout, q, k, v, out, lse, impl="reference", dlse=dlse, **options)
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("options", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("with_dlse", [True, False])
def test_equals_plain_autograd(heads: tuple[int, int], options: dict[str, Any], with_dlse: bool) -> None:
    *inputs, dlse = draw(*heads)
    dlse = dlse if with_dlse else None
    assert_close(gradients(*inputs, dlse=dlse, **options), dense.attention(*inputs, dlse, **options), num_chunks=2)


@pytest.mark.parametrize("scale", [None, 0.7])
def test_equals_scaled_dot_product_attention(scale: float | None) -> None:
    q, k, v, *_ = draw()
    out, _ = attention_forward(q, k, v, impl="reference", causal=True, softmax_scale=scale)
    want = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True, scale=scale
    )
    assert_close({"out": out}, {"out": want.transpose(1, 2)})


@pytest.mark.parametrize("options", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("pieces", [1, 5])
def test_rows_in_blocks_and_keys_in_pieces(pieces: int, options: dict[str, Any]) -> None:
    """Five rows at a time, with the keys from the first to the last that they see."""
    *inputs, dlse = draw()
    whole = gradients(*inputs, dlse=dlse, **options)
    with mock.patch.object(reference, "_MAX_SCORES", 2 * 4 * 12 * 5), keys_in_pieces(pieces):
        assert_close(gradients(*inputs, dlse=dlse, **options), whole)
    again = gradients(*inputs, dlse=dlse, **options)
    assert all(torch.equal(again[name], x) for name, x in whole.items())


@pytest.mark.parametrize("cuts", [(0, 5, 12), (0, 1, 2, 3, 12), (0, 4, 4, 12)])
def test_resumes_over_split_keys(cuts: tuple[int, ...]) -> None:
    """Causal, so that early rows see nothing of late parts, and one part may be empty of keys altogether."""
    q, k, v, dout, dlse = draw()
    want = dense.attention(q, k, v, dout, dlse, causal=True)
    acc, lse, parts = None, None, []
    for start, stop in zip(cuts, cuts[1:], strict=False):
        if start == stop:
            continue
        keys, mask = slice(start, stop), Mask.of(12, stop - start, [Region(0, 12, 0, stop - start, None, -start)])
        acc, lse = attention_forward(q, k[:, keys], v[:, keys], impl="reference", mask=mask, acc=acc, out=acc, lse=lse)
        parts.append((keys, mask))
    backward = begin_backward(dout, q, acc, lse, impl="reference", num_kv_heads=k.shape[2], dlse=dlse)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for keys, mask in parts:
        backward.add(k[:, keys], v[:, keys], mask, dk[:, keys], dv[:, keys])
    assert_close({"out": acc, "lse": lse, "dq": backward.finish(), "dk": dk, "dv": dv}, want)


def test_dq_into_a_view() -> None:
    """The heads of a larger tensor are written, the others left."""
    q, k, v, dout, _ = draw()
    out, lse = attention_forward(q, k, v, impl="reference", causal=True)
    backward = begin_backward(dout, q, out, lse, impl="reference")
    backward.add(k, v, Mask.band(12, 12, causal=True), torch.zeros_like(k), torch.zeros_like(v))
    whole = torch.zeros(2, 12, 6, 16, dtype=q.dtype)
    assert torch.equal(backward.finish(whole[:, :, 1:5]), backward.finish())
    assert torch.equal(whole[:, :, 1:5], backward.finish()) and not whole[:, :, [0, 5]].any()


def test_a_row_that_sees_nothing() -> None:
    """out = 0, lse = -inf, no gradient: fewer keys than queries, causal from the bottom right."""
    q, k, v, dout, _ = draw()
    result = gradients(q, k[:, :5], v[:, :5], dout, causal=True)
    assert not result["out"][:, :7].any() and bool(torch.isneginf(result["lse"][..., :7]).all())
    assert not result["dq"][:, :7].any()
    assert all(bool(torch.isfinite(result[name]).all()) for name in ("out", "dq", "dk", "dv"))


@pytest.mark.parametrize("name, index", [("q", 0), ("k", 1), ("v", 2)])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_reaches_only_the_rows_that_see_it(name: str, index: int, value: float) -> None:
    """Row 5 of q is seen by itself; row 5 of k or v by the rows from 5 to 7."""
    inputs = list(draw()[:3])
    clean, _ = attention_forward(*inputs, impl="reference", causal=True, window_size=(2, 0))
    inputs[index] = inputs[index].clone()
    inputs[index][:, 5] = value
    out, _ = attention_forward(*inputs, impl="reference", causal=True, window_size=(2, 0))
    touched = {5} if name == "q" else {5, 6, 7}
    others = [row for row in range(12) if row not in touched]
    assert torch.equal(out[:, others], clean[:, others])
    assert bool(torch.isnan(out[:, sorted(touched)]).any(-1).all())


@pytest.mark.parametrize(
    "change, message",
    [
        ({"acc": torch.zeros(2, 12, 4, 16, dtype=torch.float64)}, "lse must be given with acc, got None; pass"),
        ({"out": torch.zeros(2, 12, 4, 8)}, "out must be .*, got"),
        ({"lse": torch.zeros(2, 12, 4)}, "lse must be .*, got"),
        ({"mask": Mask.full(12, 12), "causal": True}, "mask must come without causal and window_size, got both; put"),
        ({"mask": Mask.full(12, 11)}, r"mask must be made for seqlen_q, seqlen_k \(12, 12\), got \(12, 11\); build"),
        ({"impl": "cutlass"}, "impl must be one of .*, got 'cutlass'; use"),
        ({"window_size": (-2, 0)}, r"window_size must be \(left, right\), each -1 .* got \(-2, 0\); a window"),
        ({"softmax_scale": -0.5}, "softmax_scale must be positive and finite, got -0.5; leave it out .* or negate q"),
        ({"k": torch.zeros(2, 12, 2, 16, requires_grad=True).double()}, "must not require grad, got tensors that do, "),
    ],
)
def test_refusals(change: dict[str, Any], message: str) -> None:
    q, k, v, *_ = draw()
    with pytest.raises(ValueError, match=message):
        attention_forward(**{"q": q, "k": k, "v": v, "impl": "reference", **change})


@pytest.mark.parametrize("index", range(3))
def test_results_over_inputs_are_refused(index: int) -> None:
    """They would be read after they were overwritten."""
    inputs = draw(4, 4)[:3]
    with pytest.raises(ValueError, match="out must not be q, k or v, got one of them"):
        attention_forward(*inputs, impl="reference", out=inputs[index])


@pytest.mark.parametrize("problem", [RuntimeError("triton must be ..."), ImportError("undefined symbol")])
def test_refusal_is_about_the_kernel_asked_for(problem: Exception) -> None:
    """Though another one, asked whether it could take the inputs, finds its own environment broken."""
    with mock.patch.object(flash4, "unsupported", side_effect=problem):
        with pytest.raises(NotImplementedError, match=r"impl='flash2' must be able .*; use one of \['reference'\]"):
            attention_forward(*draw()[:3], impl="flash2")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"dout": torch.zeros(2, 12, 4, 16)}, r"dout must be .* in torch.float64, got .* in torch.float32; pass"),
        ({"dout": torch.zeros(2, 12, 1, 16).double()}, r"dout must be .*, got \(2, 12, 1, 16\) in .*; pass"),
        ({"out": torch.zeros(2, 1, 4, 16).double()}, "out must be .*, got .*; pass"),
        ({"lse": torch.zeros(2, 1, 12).double()}, r"lse must be \(2, 4, 12\) in .*, got \(2, 1, 12\) in .*; pass"),
        ({"dlse": torch.zeros(12).double()}, r"dlse must be \(2, 4, 12\) in .*, got \(12,\) in .*; pass"),
    ],
)
def test_gradients_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    """They would be broadcast, and the heads' sums wrong."""
    q, k, v, dout, dlse = draw()
    out, lse = attention_forward(q, k, v, impl="reference")
    given = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse, "dlse": dlse, **change}
    with pytest.raises(ValueError, match=message):
        attention_backward(**given, impl="reference")
    del given["k"], given["v"]
    with pytest.raises(ValueError, match=message):
        begin_backward(**given, impl="reference", num_kv_heads=2)
    message = r"num_heads must be a multiple of num_kv_heads \(3\), got 4; repeat heads of k and v"
    with pytest.raises(ValueError, match=message):
        begin_backward(dout, q, out, lse, impl="reference", num_kv_heads=3)


@pytest.mark.parametrize("name", ["v", "dout"])
def test_nan_reaches_only_gradients_that_see_it(name: str) -> None:
    """Row 5 of v is seen by rows 5 to 7, which see keys 3 to 7; row 5 of dout sees keys 3 to 5. 0 * NaN is NaN."""
    q, k, v, dout, _ = draw()
    (v if name == "v" else dout)[:, 5] = float("nan")
    result = gradients(q, k, v, dout, causal=True, window_size=(2, 0))
    rows, keys = ([5, 6, 7], [3, 4, 5, 6, 7]) if name == "v" else ([5], [3, 4, 5])
    for gradient, want in (("dq", rows), ("dk", keys)):
        broken = result[gradient].isnan().flatten(2).any(-1).any(0)
        assert broken.nonzero().flatten().tolist() == want, gradient
