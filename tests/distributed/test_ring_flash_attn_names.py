"""The functions of ring-flash-attention, computed by ringflash, equal dense attention on that package's shards.

gloo, 2 CPU processes, fp64.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ringflash.compat import ring_flash_attn as names
from ringflash.testing import dense
from ringflash.testing.tolerance import assert_close
from tests.helpers import models
from tests.helpers.pool import Context, on_ranks

SEQLEN, HEADS, DIM = 16, 4, 8
DOCUMENTS = [[0, 16], [0, 3, 10, 16], [0, 8, 16], [0, 2, 16]]


def problem(num_kv_heads: int, batch: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    heads = {"q": HEADS, "k": num_kv_heads, "v": num_kv_heads, "dout": HEADS}
    return {
        name: torch.randn(batch, SEQLEN, num, DIM, generator=generator, dtype=torch.float64)
        for name, num in heads.items()
    }


def part(x: torch.Tensor, ctx: Context, zigzag: bool, dim: int = 1) -> torch.Tensor:
    """The shard of that package's tests: one of cp_size parts, or two of 2 * cp_size."""
    pieces = x.chunk(2 * ctx.size if zigzag else ctx.size, dim)
    return torch.cat([pieces[ctx.rank], pieces[-1 - ctx.rank]], dim) if zigzag else pieces[ctx.rank]


def packed(form: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    """Arguments of a form, as leaves."""
    forms = {"": (q, k, v), "kv": (q, torch.stack((k, v), -3)), "qkv": ()}
    tensors = (torch.stack((q, k, v), -3),) if form == "qkv" else forms[form]
    return [x.detach().clone().requires_grad_() for x in tensors]


def unpacked(form: str, grads: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    """dq, dk and dv."""
    parts = [x for grad in grads for x in (grad.unbind(-3) if form and grad is grads[-1] else (grad,))]
    return dict(zip(("dq", "dk", "dv"), parts, strict=True))


def assert_dense(ctx: Context, form: str, zigzag: bool, whole: dict, leaves: list, result: Any, **mask: Any) -> None:
    """Compare one call, and its gradients, with this rank's part of dense attention."""
    want = dense.attention(**whole, **mask)
    out, lse, nothing = result
    flat = out.dim() == 3
    dout = part(whole["dout"], ctx, zigzag)
    grads = torch.autograd.grad(out, leaves, dout[0] if flat else dout)
    got = {"out": out, "lse": lse} | unpacked(form, grads)
    expected = {name: part(want[name], ctx, zigzag, 2 if name == "lse" else 1) for name in got}
    assert_close({name: x.detach()[None] if flat else x.detach() for name, x in got.items()}, expected)
    assert nothing is None


@pytest.mark.parametrize("form", ["", "kv", "qkv"])
@pytest.mark.parametrize("name, causal, window", [("ring", False, (-1, -1)), ("zigzag", True, (5, 0))])
@on_ranks(2)
def test_batches(ctx: Context, name: str, form: str, causal: bool, window: tuple[int, int]) -> None:
    whole = problem(HEADS if form == "qkv" else 2, 2)
    zigzag = name == "zigzag"
    leaves = packed(form, *(part(whole[x], ctx, zigzag) for x in "qkv"))
    function = getattr(names, f"{'zigzag_' * zigzag}ring_flash_attn_{form + 'packed_' if form else ''}func")
    result = function(*leaves, 0.0, 0.3, causal, window_size=window, return_attn_probs=True, group=ctx.group)
    assert_dense(ctx, form, zigzag, whole, leaves, result, causal=causal, window_size=window, softmax_scale=0.3)


@pytest.mark.parametrize(
    "form, bounds, causal, window",
    [
        *(("", bounds, True, (-1, -1)) for bounds in DOCUMENTS),
        ("", DOCUMENTS[1], False, (-1, -1)),
        ("", DOCUMENTS[1], True, (4, 0)),
        ("kv", DOCUMENTS[1], True, (-1, -1)),
        ("qkv", DOCUMENTS[1], True, (-1, -1)),
    ],
    ids=str,
)
@on_ranks(2)
def test_packed_documents(ctx: Context, form: str, bounds: list[int], causal: bool, window: tuple[int, int]) -> None:
    whole = problem(HEADS if form == "qkv" else 2, 1)
    leaves = packed(form, *(part(whole[x], ctx, False)[0] for x in "qkv"))
    given = torch.tensor(bounds, dtype=torch.int32)
    if causal:
        names.update_ring_flash_attn_params(given, ctx.group)
        arguments = dict(names.DATA_PARAMS)
    else:
        found = names.llama3_flash_attn_prepare_cu_seqlens(given, causal, ctx.rank, ctx.size)
        order = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "local_k_slice")
        arguments = dict(zip(order, found, strict=True))
    function = getattr(names, f"llama3_flash_attn_varlen_{form + 'packed_' if form else ''}func")
    result = function(
        *leaves, **arguments, heads_k_stride=1, causal=causal, window_size=window, return_attn_probs=True,
        group=ctx.group,
    )  # fmt: skip
    assert_dense(ctx, form, False, whole, leaves, result, causal=causal, window_size=window, cu_seqlens=bounds)


@pytest.mark.parametrize("form, window", [("", (-1, -1)), ("kv", (3, 0)), ("qkv", (-1, -1))])
@on_ranks(2, 4)
def test_zigzags_of_documents(ctx: Context, form: str, window: tuple[int, int]) -> None:
    bounds = [0, 8, 16]
    whole = problem(HEADS if form == "qkv" else 2, 1)

    def part_of_each(x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        return torch.cat([part(document, ctx, True, dim) for document in x.split(8, dim)], dim)

    leaves = packed(form, *(part_of_each(whole[x])[0] for x in "qkv"))
    function = getattr(names, f"zigzag_ring_flash_attn_varlen_{form + 'packed_' if form else ''}func")
    given = torch.tensor(bounds, dtype=torch.int32) // ctx.size
    out, lse, nothing = function(
        *leaves, given, 8 // ctx.size, 0.0, 0.3, True, window, return_attn_probs=True, group=ctx.group
    )
    grads = unpacked(form, torch.autograd.grad(out, leaves, part_of_each(whole["dout"])[0]))
    want = dense.attention(**whole, causal=True, window_size=window, cu_seqlens=bounds, softmax_scale=0.3)
    got = {name: x.detach()[None] for name, x in {"out": out, "lse": lse, **grads}.items()}
    assert_close(got, {name: part_of_each(want[name], 2 if name == "lse" else 1) for name in got})
    assert nothing is None


@on_ranks(2)
def test_packed_documents_in_inference_mode(ctx: Context) -> None:
    """Bounds are prepared in inference mode, as by an evaluation."""
    whole = problem(2, 1)
    with torch.inference_mode():
        names.update_ring_flash_attn_params(torch.tensor(DOCUMENTS[1], dtype=torch.int32), ctx.group)
        q, k, v = (part(whole[x], ctx, False)[0] for x in "qkv")
        out = names.llama3_flash_attn_varlen_func(
            q, k, v, **names.DATA_PARAMS, heads_k_stride=1, causal=True, group=ctx.group
        )
    want = dense.attention(**whole, causal=True, cu_seqlens=DOCUMENTS[1])["out"]
    assert_close({"out": out[None]}, {"out": part(want, ctx, False)})


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("bounds", DOCUMENTS, ids=str)
def test_prepared_bounds_of_each_ranks_tensors(bounds: list[int], world_size: int, causal: bool) -> None:
    """flash-attention with these bounds sees the pairs of the whole mask: its own bounds are bottom-right aligned."""
    length, position = SEQLEN // world_size, torch.arange(SEQLEN)
    want = dense.visible(position, position, causal=causal, cu_seqlens=bounds)
    for rank in range(world_size):
        given = torch.tensor(bounds, dtype=torch.int32)
        q, k, max_q, max_k, keys = names.llama3_flash_attn_prepare_cu_seqlens(given, causal, rank, world_size)
        seen = torch.zeros(length, SEQLEN, dtype=torch.bool)
        for i in range(len(q) - 1):
            rows, columns = slice(q[i], q[i + 1]), slice(keys.start + k[i], keys.start + k[i + 1])
            size = (q[i + 1] - q[i], k[i + 1] - k[i])
            assert size[0] <= max_q and size[1] <= max_k
            block = torch.ones(*size, dtype=torch.bool)
            seen[rows, columns] = block.tril(int(size[1] - size[0])) if causal else block
        assert q.dtype == k.dtype == torch.int32 and keys.start + k[-1] == keys.stop
        assert torch.equal(seen, want[rank * length : (rank + 1) * length])


VARLEN, ZIGZAGS = "llama3_flash_attn_varlen_func", "zigzag_ring_flash_attn_varlen_func"
REFUSALS: list[tuple[str, dict[str, Any], str]] = [
    ("ring_flash_attn_func", {"dropout_p": 0.1}, "NotImplementedError: dropout_p must be 0, got 0.1"),
    ("zigzag_ring_flash_attn_func", {"alibi_slopes": [1.0]}, "NotImplementedError: alibi_slopes must be None"),
    ("zigzag_ring_flash_attn_func", {"causal": False}, "ValueError: causal must be True with zigzag shards"),
    (ZIGZAGS, {"causal": False}, "ValueError: causal must be True with zigzag shards"),
    (ZIGZAGS, {"max_seqlen": 3}, "ValueError: max_seqlen must be at least the longest document (4 tokens of"),
    (ZIGZAGS, {"cu_seqlens": "long"}, "ValueError: cu_seqlens must be 1-D int32"),
    (VARLEN, {"dropout_p": 0.1}, "NotImplementedError: dropout_p must be 0"),
    (VARLEN, {"heads_k_stride": 3}, "ValueError: heads_k_stride must divide num_kv_heads"),
    (VARLEN, {"cu_seqlens_q": "clone"}, "ValueError: cu_seqlens_q must be what llama3_flash"),
    (VARLEN, {"cu_seqlens_k": "neg_"}, "ValueError: cu_seqlens_q must be what llama3_flash"),
    (VARLEN, {"cu_seqlens_k": "clone"}, "ValueError: cu_seqlens_k must be what"),
    (VARLEN, {"max_seqlen_k": 1}, "ValueError: max_seqlen_k must be what"),
    (VARLEN, {"causal": False}, "ValueError: causal must be what"),
]


@pytest.mark.parametrize("name, changes, text", REFUSALS)
@on_ranks(2, timeout_s=20)
def test_refusals_are_raised_on_every_rank(ctx: Context, name: str, changes: dict[str, Any], text: str) -> None:
    """Only rank 1 makes the wrong call. The next call is unharmed."""

    def call(changes: dict[str, Any]) -> None:
        x = torch.randn(1, 8, 4, 8)
        arguments: dict[str, Any] = {"causal": True, "group": ctx.group}
        if name.startswith("llama3"):
            x = x[0]
            names.update_ring_flash_attn_params(torch.tensor([0, 5, 16], dtype=torch.int32), ctx.group)
            arguments |= names.DATA_PARAMS | {"heads_k_stride": 1}
        if name == ZIGZAGS:
            x = x[0]
            arguments |= {"cu_seqlens": torch.tensor([0, 4, 8], dtype=torch.int32), "max_seqlen": 4}
        for key, value in changes.items():
            arguments[key] = getattr(arguments[key], value)() if value in ("clone", "neg_", "long") else value
        getattr(names, name)(x, x, x, **arguments)

    with pytest.raises((ValueError, NotImplementedError)) as error:
        call(changes if ctx.rank == 1 else {})
    assert f"{error.type.__name__}: {error.value}".startswith(text)
    call({})


@pytest.mark.parametrize("name", [x for x in names.__all__ if x.startswith(("stripe", "ring_flash_attn_varlen"))])
def test_shards_without_a_layout_are_refused_by_name(name: str) -> None:
    with pytest.raises(NotImplementedError, match=f"^{name} must get shards"):
        getattr(names, name)(torch.ones(1))


@pytest.mark.parametrize(
    "name", ["AllGatherComm", "get_default_args", "check_params", "create_ring_flash_attention_forward"]
)
def test_imported_names_are_refused_when_called(name: str) -> None:
    """prime-rl and axolotl import them with those that they call."""
    with pytest.raises(NotImplementedError, match=f"^{name} must only be imported, got a call"):
        getattr(names, name)(process_group=None)


def test_missing_group_and_odd_length_are_refused() -> None:
    x = torch.ones(16, 2, 8)
    with pytest.raises(RuntimeError, match="group must be a process group, or None for the default one"):
        names.ring_flash_attn_func(x[None], x[None], x[None])
    with pytest.raises(ValueError, match=r"multiple of world_size \(3\), got 16"):
        names.llama3_flash_attn_prepare_cu_seqlens(torch.tensor([0, 16]), True, 0, 3)


@on_ranks(4)
def test_the_package_s_name_leads_here(ctx: Context) -> None:
    """Default arguments run, over the default group of four ranks."""
    modules = dict(sys.modules)
    names.install()
    names.install()  # may be called again
    try:
        from ring_flash_attn import ring_flash_attn_func, stripe_flash_attn_func  # type: ignore[import-not-found]
        from ring_flash_attn.adapters.hf_adapter import DATA_PARAMS, use_ring_attn  # type: ignore[import-not-found]
        from ring_flash_attn.utils import AllGatherComm, get_default_args  # type: ignore[import-not-found]
        from ring_flash_attn.zigzag_ring_flash_attn import zigzag_ring_flash_attn_func  # type: ignore[import-not-found]
        import ring_flash_attn.adapters.hf_adapter as adapter  # type: ignore[import-not-found]  # isort: skip
    finally:
        for name in set(sys.modules) - set(modules):
            if name.startswith("ring_flash_attn"):
                del sys.modules[name]
    assert (DATA_PARAMS, use_ring_attn) == (names.DATA_PARAMS, names.use_ring_attn) and adapter is names
    assert zigzag_ring_flash_attn_func is names.zigzag_ring_flash_attn_func and callable(stripe_flash_attn_func)
    assert callable(AllGatherComm) and callable(get_default_args) and callable(adapter.check_params)
    whole = problem(2, 1)
    out = ring_flash_attn_func(*(part(whole[x], ctx, False) for x in "qkv"))
    assert_close({"out": out}, {"out": part(dense.attention(**whole, causal=False)["out"], ctx, False)})


def test_install_is_refused_after_the_package() -> None:
    with mock.patch.dict(sys.modules, {"ring_flash_attn": ModuleType("ring_flash_attn")}):
        with pytest.raises(RuntimeError, match="install must be called before ring_flash_attn is imported, got"):
            names.install()


@on_ranks(2)
def test_flash_attention_of_models_is_substituted(ctx: Context) -> None:
    """It equals dense attention in logits and gradients; wrong calls are refused."""
    pytest.importorskip("transformers")
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    bounds = [0, 7, 8, 24]
    names.substitute_hf_flash_attn(ctx.group, heads_k_stride=1)
    names.substitute_hf_flash_attn(ctx.group, heads_k_stride=2)
    try:
        model: Any = models.build("qwen3_window", "sdpa", sliding_window=16)
        alone: Any = models.build("qwen3_window", "sdpa", sliding_window=16)
        model.config._attn_implementation = "flash_attention_2"
        ids, pairs = models.tokens(), list(pairwise(bounds))
        positions = torch.cat([torch.arange(stop - start) for start, stop in pairs])[None]
        shard = {"input_ids": part(ids, ctx, False), "position_ids": part(positions, ctx, False), "use_cache": False}
        names.DATA_PARAMS.clear()
        with pytest.raises(ValueError, match="^query must be one row of packed documents .*, got 1 rows"):
            model(**shard)
        names.update_ring_flash_attn_params(torch.tensor(bounds, dtype=torch.int32), ctx.group)
        with pytest.raises((ValueError, NotImplementedError), match="^attention_mask must"):
            model(**shard, attention_mask=torch.zeros(1, 12, dtype=torch.int64))
        with pytest.raises(ValueError, match="position_ids must count from the start of the sequence or of its"):
            model(**{name: x for name, x in shard.items() if name != "position_ids"})
        logits = model(**shard).logits
        whole = torch.cat([alone(ids[:, start:stop], use_cache=False).logits for start, stop in pairs], 1)
        torch.testing.assert_close(logits, part(whole, ctx, False), rtol=1e-9, atol=1e-12)
        (logits**2).sum().backward()
        (whole**2).sum().backward()
        for got, want in zip(model.parameters(), alone.parameters(), strict=True):
            dist.all_reduce(got.grad, group=ctx.group)
            torch.testing.assert_close(got.grad, want.grad, rtol=1e-9, atol=1e-9 * float(want.grad.abs().max()))
        code = sys.modules[type(model).__module__]
        with (
            mock.patch.object(code, "Lfm2ShortConv", object, create=True),
            pytest.raises(NotImplementedError, match="got a model with recurrent layers, which would be those of each"),
        ):
            model(**shard)
        model.config.rope_parameters["rope_type"] = "dynamic"
        with pytest.raises(NotImplementedError, match="got a model with rotary angles that depend on the length"):
            model(**shard)
    finally:
        del ALL_ATTENTION_FUNCTIONS["flash_attention_2"]
