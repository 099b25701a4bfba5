"""Recurrences over a sharded sequence: the gated delta rule, and the scan of Mamba-2.

A recurrence is linear in its state: from initial state S a rank ends with A S + B, and its outputs are those from an
empty state plus a term linear in S. Each rank computes A, B and both outputs in a single run, and sends (A, B) to all
later ranks, which compute their own S.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, softplus

from ringflash.recurrent.contiguous_shard import ContiguousShard
from ringflash.recurrent.messages import check_call, states_before

# Options of the functions below that a shard has, or that belong to its tokens.
_OF_SHARD = {
    "initial_state", "initial_states", "output_final_state", "return_final_states", "return_varlen_states", "seq_idx",
    "cu_seqlens", "z",
}  # fmt: skip


def delta_rule(
    rule: Callable[..., tuple[Tensor, Tensor | None]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    shard: ContiguousShard,
    **options: Any,
) -> Tensor:
    """Run a gated delta rule, S_t = (I - beta k k^T) diag(exp(g)) S_(t-1) + beta k v^T and o_t = S_t^T q_t.

    The final state is A S + B. The rule itself computes A, and the linear map from S to the outputs: values get key_dim
    additional features, which are zero and start from the identity as their state.

    Args:
        rule: transformers' `torch_chunk_gated_delta_rule` or `chunk_kimi_delta_attention`, or
            flash-linear-attention's functions with the same arguments.
        query, key: (batch, seqlen_local, num_key_heads, key_dim), contiguous shards.
        value: (batch, seqlen_local, num_heads, value_dim).
        g: (batch, seqlen_local, num_heads), natural logarithm of the decay; or (..., key_dim).
        beta: (batch, seqlen_local, num_heads).
        options: passed to `rule`; none of tokens, documents or states.
    Returns:
        out: as value. Each document starts from an empty state.
    Raises:
        ValueError: on every rank, if tensors or bounds differ between ranks, or the shard is of another length.
        NotImplementedError: such an option.
    Numerics: states in fp32 (fp64 for fp64). Outputs from an empty state and from S are rounded to the dtype of
        query, and added in fp32.
    Source: Yang et al. 2024, arXiv:2412.06464, equation 10; ranks exchange states as in an associative scan.
    """
    check_call(shard, key.shape[1], query, key, value, g, beta)
    _check(options)
    inputs = {"query": query, "key": key, "value": value, "g": g, "beta": beta}
    pieces = [{name: x[:, a:b] for name, x in inputs.items()} for a, b in shard.pieces]
    if shard.group is None:
        return torch.cat([rule(**piece, **options)[0] for piece in pieces], 1)
    key_dim, value_dim = key.shape[-1], value.shape[-1]
    dtype = torch.promote_types(value.dtype, torch.float32)
    identity = pad(torch.eye(key_dim, dtype=dtype, device=value.device), (value_dim, 0))
    initial = identity.expand(value.shape[0], value.shape[2], -1, -1).contiguous()
    pieces[0]["value"] = pad(pieces[0]["value"], (0, key_dim))
    out, state = rule(**pieces[0], initial_state=initial, output_final_state=True, **options)
    outs = [out]
    for piece in pieces[1:]:
        out, state = rule(**piece, initial_state=None, output_final_state=True, **options)
        outs.append(out)
    assert state is not None
    earlier = states_before(pad(state, (0, key_dim + value_dim - state.shape[-1])), shard.group)
    arriving = earlier[0, ..., :value_dim]
    for rank in shard.previous:
        own, transition = earlier[rank + 1].split([value_dim, key_dim], -1)
        arriving = transition @ arriving + own
    out, response = outs[0].split([value_dim, key_dim], -1)
    carried = torch.einsum("blhk,bhkv->blhv", response.to(dtype), arriving.to(dtype))
    outs[0] = (out.to(dtype) + carried).to(out.dtype)
    return torch.cat(outs, 1)


def mamba2_scan(
    scan: Callable[..., Any],
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    shard: ContiguousShard,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **options: Any,
) -> Tensor:
    """Run the scan of Mamba-2, S_t = exp(A dt) S_(t-1) + dt x B^T and y_t = S_t C_t + D x_t.

    Args:
        scan: transformers' `mamba2_chunk_scan` or mamba_ssm's `mamba_chunk_scan_combined`.
        x: (batch, seqlen_local, num_heads, head_dim), contiguous shard.
        dt: (batch, seqlen_local, num_heads).
        A: (num_heads,), negative.
        B, C: (batch, seqlen_local, num_groups, state_dim); each group serves num_heads / num_groups heads.
        dt_bias, dt_softplus, dt_limit: dt becomes clamp(softplus(dt + dt_bias), *dt_limit).
        options: passed to `scan`, such as D and chunk_size; none of tokens, documents or states.
    Returns:
        y: as x. Each document starts from an empty state.
    Raises:
        ValueError: on every rank, if tensors or bounds differ between ranks, or the shard is of another length.
        NotImplementedError: such an option.
    Numerics: dt and states in fp32 (fp64 for fp64), also where transformers' scan would compute dt in bf16.
    Source: Dao and Gu 2024, arXiv:2405.21060, section 6; ranks exchange states as in an associative scan.
    """
    check_call(shard, x.shape[1], x, dt, A, B, C)
    _check(options)
    dtype = torch.promote_types(x.dtype, torch.float32)
    dt = dt.to(dtype) if dt_bias is None else dt.to(dtype) + dt_bias.to(dtype)
    dt = (softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    results = [
        scan(x[:, a:b], dt[:, a:b], A, B[:, a:b], C[:, a:b], return_final_states=True, **options)
        for a, b in shard.pieces
    ]
    outs = [out for out, _ in results]
    if shard.group is not None:
        rows = slice(*shard.pieces[0])
        state = results[-1][1]
        decay = (dt[:, rows] * A.to(dtype)).cumsum(1)
        earlier = states_before(torch.cat([state.flatten(2), decay[:, -1, :, None].exp().to(state)], -1), shard.group)
        arriving = earlier[0, ..., :-1]
        for rank in shard.previous:
            arriving = earlier[rank + 1, ..., -1:] * arriving + earlier[rank + 1, ..., :-1]
        states = arriving.view(len(x), B.shape[2], -1, *state.shape[2:]).to(dtype)  # (batch, group, head, feature, n)
        carried = torch.einsum("blgn,bghpn->blghp", C[:, rows].to(dtype), states).flatten(2, 3)
        outs[0] = (outs[0].to(dtype) + decay.exp()[..., None] * carried).to(outs[0].dtype)
    return torch.cat(outs, 1)


def _check(options: dict[str, Any]) -> None:
    """Raise NotImplementedError for options of a shard only, or that act on outputs before earlier ranks are added."""
    if given := sorted(name for name, x in options.items() if name in _OF_SHARD and x is not None):
        raise NotImplementedError(
            "options must not describe tokens, documents, states or gates, which differ on a shard, got "
            f"{', '.join(given)}; pass bounds of documents to ContiguousShard.of, and multiply the result by a gate."
        )
