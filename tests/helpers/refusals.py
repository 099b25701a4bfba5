"""Bad calls of `ring_attention`, and what every rank must answer to them."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

import ringflash
from tests.helpers.pool import Context

LENGTH = 8  # local tokens


Change = Callable[[Context, dict[str, Any]], None]


class Refusal(NamedTuple):
    """One bad call.

    Args:
        error: name of the type that every rank raises.
        pattern: what its message must hold.
        change: (context, arguments) -> None, spoils the arguments of a good call.
    """

    error: str
    pattern: str
    change: Change


class Answer(NamedTuple):
    """A rank's reaction: type and text of what it raised, batches of messages it posted, a good call after it."""

    error: str
    text: str
    posted: int
    usable: bool


def attempt(ctx: Context, name: str, policy: ringflash.comm.agreement.Policy = "changed") -> Answer:
    """Make the bad call, then a good one, both new to every rank: by default only such calls are compared on GPUs."""
    ringflash.set_agreement_check(policy)
    new = 1.0 + list(REFUSALS).index(name) + (policy == "always") / 2  # a scale that no other attempt has
    arguments = {**good_call(ctx), "softmax_scale": new}
    REFUSALS[name].change(ctx, arguments)
    with mock.patch.object(dist, "batch_isend_irecv", wraps=dist.batch_isend_irecv) as post:
        try:
            ringflash.ring_attention(**arguments)
            error, text = "none", "accepted"
        except Exception as problem:
            error, text = type(problem).__name__, str(problem)
        posted = post.call_count
    out = ringflash.ring_attention(**good_call(ctx), softmax_scale=new + 0.25)
    assert isinstance(out, torch.Tensor)
    return Answer(error, text, posted, bool(torch.isfinite(out).all()))


def assert_refused(name: str, answers: list[Answer]) -> None:
    """Assert that every rank raised what it must, sent nothing, and went on."""
    expected = REFUSALS[name]
    for rank, answer in enumerate(answers):
        assert answer.error == expected.error, f"rank {rank}: {answer}"
        assert re.search(expected.pattern, answer.text), f"rank {rank}: {answer}"
        assert answer.posted == 0, f"rank {rank} sent something: {answer}"
        assert answer.usable, f"rank {rank} cannot go on"


def good_call(ctx: Context) -> dict[str, Any]:
    """Arguments that every rank accepts."""
    q, k, v = (torch.ones(1, LENGTH, n, 16, device=ctx.device) for n in (4, 2, 2))
    return {"q": q, "k": k, "v": v, "group": ctx.group, "impl": "reference"}


def _set(**values: Any) -> Change:
    return lambda ctx, arguments: arguments.update(values)


def _each(*changes: Change) -> Change:
    """All of these changes."""
    return lambda ctx, arguments: [change(ctx, arguments) for change in changes] and None


def _last_rank(change: Change) -> Change:
    """The change on one rank only; the others make a good call."""
    return lambda ctx, arguments: change(ctx, arguments) if ctx.rank == ctx.size - 1 else None


def _tensors(change: Callable[[str, torch.Tensor], torch.Tensor]) -> Change:
    return lambda ctx, arguments: arguments.update({x: change(x, arguments[x]) for x in "qkv"})


def _cu_seqlens(make: Callable[[int], Any], dtype: torch.dtype = torch.int32) -> Change:
    """Document bounds from the global length."""
    return lambda ctx, arguments: arguments.update(cu_seqlens=torch.tensor(make(ctx.size * LENGTH), dtype=dtype))


def _trees(parents: list[int], bidirectional: list[int] | None = None, global_tokens: int = 0) -> Change:
    """A table of documents of two tokens, the last one up to the end."""

    def change(ctx: Context, arguments: dict[str, Any]) -> None:
        bounds = torch.tensor([*range(0, 2 * len(parents), 2), ctx.size * LENGTH], dtype=torch.int32)
        both = None if bidirectional is None else torch.tensor(bidirectional, dtype=torch.bool)
        arguments["cu_seqlens"] = ringflash.document_table(bounds, torch.tensor(parents), both, global_tokens)

    return change


def _rows_on_last_rank(number: int) -> Change:
    """Rows with their own bounds: one on each rank, another number on the last."""

    def change(ctx: Context, arguments: dict[str, Any]) -> None:
        rows = number if ctx.rank == ctx.size - 1 else 1
        _tensors(lambda name, x: x.expand(rows, -1, -1, -1))(ctx, arguments)
        arguments["cu_seqlens"] = [torch.tensor([0, 3, ctx.size * LENGTH], dtype=torch.int32)] * rows

    return change


def _other_transport(ctx: Context, arguments: dict[str, Any]) -> None:
    arguments["transport"] = "nccl" if ctx.device.type == "cpu" else "gloo"


def _another_device(ctx: Context, arguments: dict[str, Any]) -> None:
    arguments["k"] = arguments["k"].to("meta" if ctx.device.type == "cpu" else "cpu")


def _used_before(ctx: Context, arguments: dict[str, Any]) -> None:
    """Both calls are known to every rank from before."""
    for causal in (True, False):
        ringflash.ring_attention(**arguments, causal=causal)
    arguments["causal"] = ctx.rank == 0


def _cut(length: int) -> Callable[[str, torch.Tensor], torch.Tensor]:
    return lambda name, x: x[:, :length].contiguous()


SAME = "all ranks of the group must make the same call, got "


def _wrong(pattern: str, change: Change) -> Refusal:
    return Refusal("ValueError", pattern, change)


def _missing(pattern: str, change: Change) -> Refusal:
    return Refusal("NotImplementedError", pattern, change)


REFUSALS: dict[str, Refusal] = {
    "length": _wrong(r"seqlen must be divisible by 2 \* cp_size .*, got .*; pad to", _tensors(_cut(7))),
    "empty": _wrong("q must not be empty, got .*; every rank", _tensors(_cut(0))),
    "dimensions": _wrong(r"q must be \(batch, .*, got \(8, 4, 16\); add", _tensors(lambda name, x: x[0])),
    "integers": _wrong("q must be floating point, got torch.int64; cast", _tensors(lambda name, x: x.long())),
    "heads": _wrong(r"be a multiple of num_kv_heads \(2\), got 3; repeat", lambda c, a: a.update(q=a["q"][:, :, :3])),
    "kv_shapes": _wrong("v must have the shape of k .*got .*; slice or pad", lambda c, a: a.update(v=a["v"][:, :, :1])),
    "head_dims": _wrong(r"head_dim of q \(1, 8\), got \(1, 16\); expand", lambda c, a: a.update(q=a["q"][..., :8])),
    "kv_length": _wrong(
        r"k must have the local sequence length of q \(4\), got 8; shard",
        lambda c, a: a.update(q=a["q"][:, :4].contiguous()),
    ),
    "dtypes": _wrong("must share one dtype, got .*; move or cast", lambda c, a: a.update(k=a["k"].half())),
    "devices": _wrong("must share one device, got .*; move or cast", _another_device),
    "requires_grad": _wrong(
        "must all require grad or none of them, got only q; call", lambda c, a: a.update(q=a["q"].requires_grad_())
    ),
    "scale": _wrong("softmax_scale must be positive and finite, got 0.0", _set(softmax_scale=0.0)),
    "scale_no_number": _wrong("positive and finite, got nan; leave", _set(softmax_scale=float("nan"))),
    "scale_without_end": _wrong("softmax_scale must be positive and finite, got inf", _set(softmax_scale=float("inf"))),
    "one_rank_more_rows": _wrong(SAME + "call .*row 0 of 1.*row 0 of 2", _rows_on_last_rank(2)),
    "one_rank_wide_v": _wrong("v must have the shape of k", _last_rank(lambda c, a: a.update(v=a["v"].tile(2)))),
    "scale_to_learn": _wrong(
        "must be a number, .*multiply q by it", _last_rank(_set(softmax_scale=torch.ones((), requires_grad=True)))
    ),
    "window": _wrong(r"window_size must be \(left, right\).*got \(-2, 0\); a", _set(window_size=(-2, 0))),
    "window_length": _wrong("window_size must be", _set(window_size=(1, 2, 3))),
    "layout": _wrong("layout must be one of .*got 'braided'; zigzag", _set(layout="braided")),
    "impl": _wrong("impl must be 'auto' or one of .*got 'flash9'; 'auto'", _set(impl="flash9")),
    "impl_dtype": _missing(r"dtype torch.float32 .*use one of \['reference'\]", _set(impl="flash2")),
    "eight_bits": _missing("got dtype torch.float8_e5m2 .*cast", _tensors(lambda name, x: x.to(torch.float8_e5m2))),
    "impl_head_dim": _missing(
        r"head_dim 12 .*use one of \['reference'\]",
        lambda c, a: a.update({x: a[x][..., :12].bfloat16().contiguous() for x in "qkv"}, impl="flash2"),
    ),
    "transport": _wrong("transport must be 'auto' or .*got 'pigeon'; 'auto'", _set(transport="pigeon")),
    "other_transport": _missing("transport must be one for tensors on", _other_transport),
    "cu_seqlens_start": _wrong("cu_seqlens must start at 0", _cu_seqlens(lambda n: [1, n])),
    "cu_seqlens_single": _wrong("cu_seqlens must start at 0 and hold two", _cu_seqlens(lambda n: [0])),
    "cu_seqlens_order": _wrong("cu_seqlens must ascend", _cu_seqlens(lambda n: [0, 5, 4, n])),
    "cu_seqlens_empty": _wrong("cu_seqlens must ascend", _cu_seqlens(lambda n: [0, 5, 5, n])),
    "cu_seqlens_local": _wrong(r"end at the global .*\(\d+\), got 8; give", _cu_seqlens(lambda n: [0, LENGTH])),
    "cu_seqlens_long": _wrong("must end at the global sequence", _cu_seqlens(lambda n: [0, n + 1])),
    "cu_seqlens_dtype": _wrong("1-D int32, .* got 1-D torch.int64; pass", _cu_seqlens(lambda n: [0, n], torch.int64)),
    "cu_seqlens_scalar": _wrong("must be 1-D int32", _cu_seqlens(lambda n: n)),
    "cu_seqlens_matrix": _wrong("must be 1-D int32", _cu_seqlens(lambda n: [[0, n]] * 9)),
    "cu_seqlens_batch": _wrong(
        "batch must be 1 with cu_seqlens",
        _each(_tensors(lambda name, x: x.expand(2, -1, -1, -1)), _cu_seqlens(lambda n: [0, n])),
    ),
    "dropout": Refusal("TypeError", "dropout_p", _set(dropout_p=0.1)),
    "bias": Refusal("TypeError", "attn_bias", _set(attn_bias=None)),
    "alibi": Refusal("TypeError", "alibi_slopes", _set(alibi_slopes=None)),
    "ranks_differ_in_length": _wrong(SAME + r"q \[", _last_rank(_tensors(_cut(4)))),
    "ranks_differ_in_heads": _wrong(SAME + "q ", _last_rank(lambda c, a: a.update(q=a["q"][:, :, :2].contiguous()))),
    "ranks_differ_in_dtype": _wrong(SAME + "dtype", _last_rank(_tensors(lambda name, x: x.double()))),
    "ranks_differ_in_causal": _wrong(SAME + "causal", _last_rank(_set(causal=False))),
    "ranks_differ_in_window": _wrong(SAME + "window_size", _last_rank(_set(window_size=(3, 0)))),
    "ranks_differ_in_scale": _wrong(SAME + "softmax_scale", _last_rank(_set(softmax_scale=0.5))),
    "ranks_differ_in_layout": _wrong(SAME + "layout", _last_rank(_set(layout="contiguous"))),
    "ranks_differ_in_impl": _wrong(SAME + "impl", _last_rank(_set(impl="auto"))),
    "ranks_differ_in_lse": _wrong(SAME + "return_lse", _last_rank(_set(return_lse=True))),
    "ranks_differ_in_grad": _wrong(SAME + "requires_grad", _last_rank(_tensors(lambda name, x: x.requires_grad_()))),
    "ranks_differ_in_v_width": _wrong(
        SAME + r"v_head_dim 16 \(rank 0.*\), 12 \(rank", _last_rank(lambda c, a: a.update(v=a["v"][..., :12]))
    ),
    "ranks_differ_in_determinism": _wrong(SAME + "deterministic", _last_rank(_set(deterministic=True))),
    "ranks_differ_in_documents": _wrong(SAME + "cu_seqlens", _last_rank(_cu_seqlens(lambda n: [0, n]))),
    "ranks_differ_in_many_documents": _wrong(
        SAME + "cu_seqlens [0-9]+ bounds, checksum",
        lambda c, a: _cu_seqlens(lambda n: [0, 1 + (c.rank == 0), *range(3, n + 1)])(c, a),
    ),
    "balanced_without_documents": _wrong(
        "cu_seqlens must be given with layout='balanced', got None; pass", _set(layout="balanced")
    ),
    "balanced_over_hosts": _missing(
        "layout must be 'zigzag', 'striped' or 'contiguous' with transport 'ulysses', got 'balanced'",
        _each(_set(layout="balanced", transport="ulysses"), _cu_seqlens(lambda n: [0, n])),
    ),
    "document_that_is_not_divisible": _wrong(
        r"each document must have a length divisible by 2 \* cp_size .* got 3 tokens from 0; pad each \(pad_sequence",
        _each(_set(layout="documents"), _cu_seqlens(lambda n: [0, 3, n])),
    ),
    "documents_over_hosts": _missing(
        "layout must be 'zigzag', 'striped' or 'contiguous' with transport 'ulysses', got 'documents'",
        _each(_set(layout="documents", transport="ulysses"), _cu_seqlens(lambda n: [0, n])),
    ),
    "ranks_differ_in_balanced_documents": _wrong(
        SAME + "cu_seqlens",
        lambda c, a: _each(_set(layout="balanced"), _cu_seqlens(lambda n: [0, 3 + (c.rank == 0), n]))(c, a),
    ),
    "parents_order": _wrong("parents must order documents depth first, got 1 for document 3", _trees([-1, 0, 0, 1])),
    "parents_ahead": _wrong("parents must order documents depth first, got 2", _trees([-1, 2, -1])),
    "parents_not_causal": _wrong("causal must be True with parents", _each(_set(causal=False), _trees([-1, 0]))),
    "global_tokens_not_causal": _wrong(
        "causal must be True with parents, bidirectional documents or global tokens",
        _each(_set(causal=False), _trees([-1, -1], global_tokens=1)),
    ),
    "global_tokens_before_branches": _wrong(
        "global_tokens must include all of a document that several continue, got 1", _trees([-1, 0, 0], global_tokens=1)
    ),
    "ranks_differ_in_global_tokens": _wrong(
        SAME + "cu_seqlens 3 bounds in a table, checksum", lambda c, a: _trees([-1, -1], global_tokens=1 + c.rank)(c, a)
    ),
    "bidirectional_right_window": _wrong(
        r"window_size must be \(left, 0\) or \(left, -1\) with bidirectional documents, got \(3, 2\); only",
        _each(_set(window_size=(3, 2)), _trees([-1, 0], [1, 0])),
    ),
    "ranks_differ_in_parents": _wrong(
        SAME + "cu_seqlens 4 bounds in a table, checksum", lambda c, a: _trees([-1, 0, 0 if c.rank else 1])(c, a)
    ),
    "ranks_differ_in_directions": _wrong(SAME + "cu_seqlens", lambda c, a: _trees([-1, 0], [c.rank > 0, False])(c, a)),
    "one_rank_parents": _wrong("depth first", _last_rank(_trees([-1, 0, 0, 1]))),
    "ranks_differ_after_both_calls": _wrong(SAME + "causal", _used_before),
    "one_rank_window": _wrong(r"window_size must be", _last_rank(_set(window_size=(-2, 0)))),
    "one_rank_window_length": _wrong(r"window_size must be", _last_rank(_set(window_size=(1, 2, 3)))),
    "one_rank_impl": _missing("must be able to take", _last_rank(_set(impl="flash2"))),
    "one_rank_length": _wrong("seqlen must be divisible", _last_rank(_tensors(_cut(7)))),
    "one_rank_documents": _wrong("cu_seqlens must start", _last_rank(_cu_seqlens(lambda n: [1, n]))),
    "one_rank_bound_type": _wrong("must be 1-D int32", _last_rank(_cu_seqlens(lambda n: n))),
}
