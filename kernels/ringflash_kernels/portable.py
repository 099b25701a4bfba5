"""torch's own FlashAttention-2 operators, for CUDA devices without a kernel of ours.

They return the log-sum-exp but cannot resume, so every region of a mask is one call and the results are
merged in fp32 outside. Neighbouring documents with the same band go into one variable-length call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch

from ringflash_kernels.mask import Mask, Region
from ringflash_kernels.merge import merge_

_DTYPES = (torch.float16, torch.bfloat16)


def unsupported(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
    """Why this implementation cannot take the call; None when it can."""
    if q.dtype not in _DTYPES:
        return f"dtype {q.dtype} (fp16 or bf16)"
    if q.shape[-1] > 256 or q.shape[-1] % 8:
        return f"head_dim {q.shape[-1]} (a multiple of 8 up to 256)"
    if q.device.type != "cuda":
        return f"device {q.device.type} (cuda)"
    if torch.cuda.get_device_capability(q.device) < (8, 0):
        return "compute capability below 8.0"
    return None


@dataclass
class _Call:
    """One operator call: rows and columns, the window in FlashAttention's terms, bounds of the documents in it."""

    rows: slice
    cols: slice
    window: tuple[int, int]
    q_bounds: tuple[int, ...]
    k_bounds: tuple[int, ...]
    _cum: tuple[torch.Tensor, torch.Tensor] | None = None

    def lengths(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, int, int]:
        """cu_seqlens of queries and keys (None for a single document) and the longest lengths."""
        if len(self.q_bounds) == 2:
            return None, None, q.shape[1], k.shape[1]
        if self._cum is None or self._cum[0].device != q.device:
            cum_q, cum_k = (torch.tensor(x, dtype=torch.int32, device=q.device) for x in (self.q_bounds, self.k_bounds))
            self._cum = cum_q, cum_k
        max_q, max_k = (max(b - a for a, b in pairwise(x)) for x in (self.q_bounds, self.k_bounds))
        return *self._cum, max_q, max_k


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Mask,
    softmax_scale: float,
    *,
    out: torch.Tensor,
    lse: torch.Tensor,
    acc: torch.Tensor | None = None,
) -> None:
    """See `api.attention_forward`; arguments are checked there."""
    if acc is None:
        out.zero_()
        lse.fill_(float("-inf"))
    calls = _calls(mask)
    state = _state(out, acc, single=len(calls) == 1)
    for call in calls:
        part, part_lse = _flash_forward(q[:, call.rows], k[:, call.cols], v[:, call.cols], call, softmax_scale)
        if acc is None and len(calls) == 1:
            state[:, call.rows] = part
            lse[..., call.rows] = part_lse
        else:
            merge_(state[:, call.rows], lse[..., call.rows], part, part_lse)
    if state is not out:
        out.copy_(state)


class Backward:
    """Gradients of one attention, hop by hop; see `api.begin_backward`."""

    def __init__(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        *,
        softmax_scale: float,
        dlse: torch.Tensor | None = None,
        deterministic: bool = False,
    ) -> None:
        self.dout, self.q, self.out, self.lse = dout, q, out, lse
        self.softmax_scale, self.dlse, self.deterministic = softmax_scale, dlse, deterministic
        self.dq = torch.zeros_like(q, dtype=torch.float32)

    def add(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: Mask,
        dk: torch.Tensor,
        dv: torch.Tensor,
        *,
        accumulate: bool = True,
    ) -> None:
        """Gradients of the pairs of `mask`: added to dk, dv and to the dq held here."""
        calls = _calls(mask)
        total_k, total_v = (x if accumulate else torch.zeros_like(x, dtype=torch.float32) for x in (dk, dv))
        for call in calls:
            keys, values = k[:, call.cols], v[:, call.cols]
            part_q, part_k, part_v = self._flash_backward(self.dout, self.out, keys, values, call)
            total_v[:, call.cols] += part_v
            self._add_query_key(call, part_q, part_k, total_k)
            if self.dlse is not None:
                dout, out, unit = self._lse_gradient_inputs(values)
                part_q, part_k, _ = self._flash_backward(dout, out, keys, unit, call)
                self._add_query_key(call, part_q, part_k, total_k)
        if not accumulate:
            dk.copy_(total_k)
            dv.copy_(total_v)

    def finish(self) -> torch.Tensor:
        """dq: (batch, seqlen_q, num_heads, head_dim), dtype of q."""
        return self.dq.to(self.q.dtype)

    def _add_query_key(self, call: _Call, part_q: torch.Tensor, part_k: torch.Tensor, dk: torch.Tensor) -> None:
        self.dq[:, call.rows] += part_q
        dk[:, call.cols] += part_k

    def _lse_gradient_inputs(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """dout, out and v for which the operator's dS = P (dP - delta) becomes P dlse: its own delta is not ours."""
        assert self.dlse is not None
        dout, unit = torch.zeros_like(self.q), torch.zeros_like(values)
        dout[..., 0] = self.dlse.transpose(1, 2)
        unit[..., 0] = 1.0
        return dout, torch.zeros_like(self.q), unit

    def _flash_backward(
        self, dout: torch.Tensor, out: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: _Call
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows = call.rows
        dout, q, out, lse = dout[:, rows], self.q[:, rows], out[:, rows], self.lse[..., rows]
        cum_q, cum_k, max_q, max_k = call.lengths(q, k)
        if cum_q is not None:
            dout, q, k, v, out, lse = (x.squeeze(0) for x in (dout, q, k, v, out, lse))
        unused = torch.empty(0, dtype=torch.int64, device=q.device)  # dropout state
        left, right = call.window
        with _deterministic(self.deterministic):
            grads = torch.ops.aten._flash_attention_backward(
                dout, q, k, v, out, lse.contiguous(), cum_q, cum_k, max_q, max_k, 0.0, False, unused, unused,
                scale=self.softmax_scale, window_size_left=left, window_size_right=right,
            )  # fmt: skip
        return tuple(x.unsqueeze(0) for x in grads) if cum_q is not None else grads


def _flash_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: _Call, softmax_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    cum_q, cum_k, max_q, max_k = call.lengths(q, k)
    if cum_q is not None:
        q, k, v = (x.squeeze(0) for x in (q, k, v))
    left, right = call.window
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, cum_q, cum_k, max_q, max_k, 0.0, False, False,
        scale=softmax_scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return (out.unsqueeze(0), lse.unsqueeze(0)) if cum_q is not None else (out, lse)


@contextlib.contextmanager
def _deterministic(enabled: bool) -> Iterator[None]:
    """torch's operator takes its order of accumulation from the global switch only."""
    before, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    if enabled:
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


def _state(out: torch.Tensor, acc: torch.Tensor | None, *, single: bool) -> torch.Tensor:
    """Where parts are merged: the given state, or the output itself where no merge rounds it."""
    if acc is not None:
        return acc
    return out if single or out.dtype == torch.float32 else torch.zeros_like(out, dtype=torch.float32)


def _calls(mask: Mask) -> list[_Call]:
    """The mask's regions as operator calls; runs of regions that continue one another share one."""
    if "flash2" not in mask._cache:
        runs: list[list[Region]] = []
        for region in (piece for whole in mask.regions for piece in _pieces(whole)):
            if runs and _continues(runs[-1], region):
                runs[-1].append(region)
            else:
                runs.append([region])
        mask._cache["flash2"] = [_call(run) for run in runs]
    return mask._cache["flash2"]  # type: ignore[return-value]


def _pieces(region: Region) -> list[Region]:
    """The region cut into rows that the operator's window can express.

    It counts from the bottom right corner and takes a right side of seqlen_k or more for unlimited, which it
    then sets to seqlen_k: too little for the top rows where there are more queries than keys. Rows bound on a
    side are never more than the keys, so cutting where a bound begins or ends to bind is enough.
    """
    q_start, q_stop, k_start, k_stop, lower, upper = region
    if q_stop - q_start <= k_stop - k_start:
        return [region]
    cuts = [] if upper is None else [k_stop - 1 - upper]
    cuts += [] if lower is None else [k_start - lower + 1]
    edges = sorted({q_start, q_stop, *(cut for cut in cuts if q_start < cut < q_stop)})
    pieces = (Region(a, b, k_start, k_stop, lower, upper).trimmed() for a, b in pairwise(edges))
    return [piece for piece in pieces if piece is not None]


def _continues(run: list[Region], region: Region) -> bool:
    """Whether one call may hold both: squares along one diagonal, so that a band is the same window in each."""
    if any(r.q_stop - r.q_start != r.k_stop - r.k_start for r in (run[-1], region)):
        return False
    starts_where_run_stops = (region.q_start, region.k_start) == (run[-1].q_stop, run[-1].k_stop)
    return starts_where_run_stops and _common_window([*run[:1], run[-1], region]) is not None


def _common_window(run: list[Region]) -> tuple[int, int] | None:
    """One (left, right) window that is right for every region of the run; None where there is none.

    The operator counts both sides from the bottom right corner. A side that is open in a region
    may be closed at any distance that reaches across it.
    """
    left = _common_side(
        [(r.lower is not None, r.k_stop - r.q_stop - (r.lower or 0), r.k_stop - r.k_start) for r in run]
    )
    right = _common_side(
        [(r.upper is not None, r.q_stop - r.k_stop + (r.upper or 0), r.q_stop - r.q_start) for r in run]
    )
    return None if left is None or right is None else (left, right)


def _common_side(sides: list[tuple[bool, int, int]]) -> int | None:
    """The distance shared by (closed, distance, size across) of every region; -1 where all are open."""
    distances = {distance for closed, distance, _ in sides if closed}
    if not distances:
        return -1
    distance = distances.pop()
    fits = not distances and all(closed or distance >= across - 1 for closed, _, across in sides)
    return distance if fits else None


def _call(run: list[Region]) -> _Call:
    first, last = run[0], run[-1]
    window = _common_window(run)
    assert window is not None
    q_bounds = (0, *(region.q_stop - first.q_start for region in run))
    k_bounds = (0, *(region.k_stop - first.k_start for region in run))
    return _Call(slice(first.q_start, last.q_stop), slice(first.k_start, last.k_stop), window, q_bounds, k_bounds)
