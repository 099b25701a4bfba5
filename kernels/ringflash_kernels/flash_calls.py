"""A mask as calls of a FlashAttention operator: one rectangle of rows and keys, one window, document bounds.

`flash2` and `flash4` use it, since their operators neither take a mask of several regions nor resume: it lists the
calls, and merges their results in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ringflash_kernels.mask import Mask, Region, upload
from ringflash_kernels.merge import merge_


@dataclass
class FlashCall:
    """One operator call.

    Args:
        rows, cols: query and key rows.
        window: (left, right) counted from the bottom right corner, -1 unlimited.
        q_bounds, k_bounds: cumulative lengths of the documents inside; two entries for a single one.
    """

    rows: slice
    cols: slice
    window: tuple[int, int]
    q_bounds: tuple[int, ...]
    k_bounds: tuple[int, ...]
    _cum: tuple[Tensor, Tensor] | None = None

    @property
    def is_packed(self) -> bool:
        """True if the call holds several documents."""
        return len(self.q_bounds) > 2

    def lengths(self, device: torch.device) -> tuple[Tensor | None, Tensor | None, int, int]:
        """Return cu_seqlens of queries and keys, int32 (None for a single document), and the longest lengths."""
        max_q, max_k = (max(b - a for a, b in pairwise(x)) for x in (self.q_bounds, self.k_bounds))
        if not self.is_packed:
            return None, None, max_q, max_k
        if self._cum is None or self._cum[0].device != device:
            bounds = (torch.tensor(x, dtype=torch.int32, device="cpu") for x in (self.q_bounds, self.k_bounds))
            cum_q, cum_k = upload(device, *bounds)
            self._cum = cum_q, cum_k
        return *self._cum, max_q, max_k

    def without_batch(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return tensors without their batch dimension if the call is packed: the operators then take none."""
        return tuple(x.squeeze(0) for x in tensors) if self.is_packed else tensors

    def with_batch(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Invert `without_batch`."""
        return tuple(x.unsqueeze(0) for x in tensors) if self.is_packed else tensors


def calls(mask: Mask, batch: int = 1) -> list[FlashCall]:
    """Return the mask's regions as operator calls; a run of regions that continue one another shares a call.

    In a batch of several sequences each region is a call: the operator supports documents only in a single sequence.
    """
    return mask.cached(("calls", batch > 1), lambda: _new_calls(mask, joined=batch == 1))


def _new_calls(mask: Mask, *, joined: bool) -> list[FlashCall]:
    """Return the calls of all regions, in order; `joined` allows several documents in one call."""
    runs: list[_Run] = []
    for region in (piece for whole in mask.regions for piece in _pieces(whole)):
        longer = runs[-1].joined(region) if runs and joined else None
        if longer is not None:
            runs[-1] = longer
        else:
            runs.append(_Run.of(region))
    return [run.call() for run in runs]


# Takes q, k and v of a call, without a batch dimension if it is packed, and softmax_scale; returns out and lse alike.
Flash = Callable[[Tensor, Tensor, Tensor, FlashCall, float], tuple[Tensor, Tensor]]


def merged_forward(
    flash: Flash,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    softmax_scale: float,
    *,
    out: Tensor,
    lse: Tensor,
    acc: Tensor | None = None,
) -> None:
    """Compute `api.attention_forward` by calls of `flash`, which returns (out, lse) of one call; see `Flash`."""
    if acc is None:
        out.zero_()
        lse.fill_(float("-inf"))
    todo = calls(mask, q.shape[0])
    is_single = acc is None and len(todo) == 1  # nothing to merge with, so no fp32 state is needed
    state = acc
    if state is None:
        state = out if is_single or out.dtype == torch.float32 else torch.zeros_like(out, dtype=torch.float32)
    for call in todo:
        rows, keys, values = call.without_batch(q[:, call.rows], k[:, call.cols], _widened(v[:, call.cols], k))
        part, part_lse = call.with_batch(*flash(rows, keys, values, call, softmax_scale))
        part = part[..., : v.shape[3]]
        if is_single:
            state[:, call.rows] = part
            lse[..., call.rows] = part_lse
        else:
            merge_(state[:, call.rows], lse[..., call.rows], part, part_lse)
    if state is not out:
        out.copy_(state)


class MergedBackward:
    """Base class of `api.begin_backward` by operator calls; a subclass computes the gradients of one call."""

    def __init__(
        self,
        dout: Tensor,
        q: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        softmax_scale: float,
        dlse: Tensor | None = None,
        deterministic: bool = False,
    ) -> None:
        self.dout, self.q, self.out, self.lse = _widened(dout, q), q, _widened(out, q), lse
        self.softmax_scale, self.dlse, self.deterministic = softmax_scale, dlse, deterministic
        self.dq = torch.zeros_like(q, dtype=torch.float32)

    def gradients(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None,
        call: FlashCall,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Return dq, dk and dv of one call, given its rows and keys, as `flash` takes them."""
        raise NotImplementedError

    def add(self, k: Tensor, v: Tensor, mask: Mask, dk: Tensor, dv: Tensor, *, accumulate: bool = True) -> None:
        """Add the gradients of the pairs of `mask` to dk, dv and self.dq."""
        total_k, total_v = (x if accumulate else torch.zeros_like(x, dtype=torch.float32) for x in (dk, dv))
        for call in calls(mask, k.shape[0]):
            dout, q, out = (x[:, call.rows] for x in (self.dout, self.q, self.out))
            keys, values, lse = k[:, call.cols], _widened(v[:, call.cols], k), self.lse[..., call.rows].contiguous()
            dlse = None if self.dlse is None else call.without_batch(self.dlse[..., call.rows].contiguous())[0]
            dout, q, keys, values, out, lse = call.without_batch(dout, q, keys, values, out, lse)
            part_q, part_k, part_v = call.with_batch(*self.gradients(dout, q, keys, values, out, lse, dlse, call))
            self.dq[:, call.rows] += part_q
            total_k[:, call.cols] += part_k
            total_v[:, call.cols] += part_v[..., : v.shape[3]]
        if not accumulate:
            dk.copy_(total_k)
            dv.copy_(total_v)

    def finish(self, out: Tensor | None = None) -> Tensor:
        """Return dq: (batch, seqlen_q, num_heads, head_dim), dtype of q; in `out` if given."""
        return self.dq.to(self.q.dtype) if out is None else out.copy_(self.dq)


def _widened(x: Tensor, like: Tensor) -> Tensor:
    """Pad v, out or dout to the head_dim of keys: the operators take no other."""
    missing = like.shape[-1] - x.shape[-1]
    return pad(x, (0, missing)) if missing else x


def _pieces(region: Region) -> list[Region]:
    """Cut the region into runs of rows that the operator's window can express.

    The window counts from the bottom right corner. The operator takes a right side of seqlen_k or more for unlimited
    and sets it to seqlen_k, which is too little for the top rows if there are more queries than keys. No more rows
    than keys are bound on a side, so it is enough to cut where a bound begins or ends to bind.
    """
    q_start, q_stop, k_start, k_stop, lower, upper = region
    if q_stop - q_start <= k_stop - k_start:
        return [region]
    cuts = [] if upper is None else [k_stop - 1 - upper]
    cuts += [] if lower is None else [k_start - lower + 1]
    edges = sorted({q_start, q_stop, *(cut for cut in cuts if q_start < cut < q_stop)})
    pieces = (Region(a, b, k_start, k_stop, lower, upper).trimmed() for a, b in pairwise(edges))
    return [piece for piece in pieces if piece is not None]


class _Side(NamedTuple):
    """One side of the window: its distance from the bottom right corner (None: open), and the least it must reach."""

    distance: int | None
    across: int

    def joined(self, other: _Side) -> _Side | None:
        """Return a side that is right for both, or None. An open side may close at any distance that reaches across."""
        distances = {side.distance for side in (self, other) if side.distance is not None}
        if len(distances) > 1:
            return None
        side = _Side(max(distances, default=None), max(self.across, other.across))
        return None if side.distance is not None and side.distance < side.across - 1 else side


@dataclass(frozen=True)
class _Run:
    """Regions that continue one another along the diagonal and share a window."""

    regions: tuple[Region, ...]
    left: _Side
    right: _Side

    @classmethod
    def of(cls, region: Region) -> _Run:
        """Build a run of one region; an open side must reach across the region."""
        q_start, q_stop, k_start, k_stop, lower, upper = region
        left = _Side(None, k_stop - k_start) if lower is None else _Side(k_stop - q_stop - lower, 0)
        right = _Side(None, q_stop - q_start) if upper is None else _Side(q_stop - k_stop + upper, 0)
        return cls((region,), left, right)

    def joined(self, region: Region) -> _Run | None:
        """Return this run with one more region, or None if the operator needs another call for it.

        Only squares along one diagonal are joined: the operator sets an open right side to seqlen_k of the longest
        document, and a region with more queries than keys may need more.
        """
        last, other = self.regions[-1], _Run.of(region)
        if any(r.q_stop - r.q_start != r.k_stop - r.k_start for r in (last, region)):
            return None
        left, right = self.left.joined(other.left), self.right.joined(other.right)
        if (region.q_start, region.k_start) != (last.q_stop, last.k_stop) or left is None or right is None:
            return None
        return _Run((*self.regions, region), left, right)

    def call(self) -> FlashCall:
        """Return the run as one operator call."""
        first, last = self.regions[0], self.regions[-1]
        window = tuple(-1 if side.distance is None else side.distance for side in (self.left, self.right))
        q_bounds = (0, *(region.q_stop - first.q_start for region in self.regions))
        k_bounds = (0, *(region.k_stop - first.k_start for region in self.regions))
        rows, cols = slice(first.q_start, last.q_stop), slice(first.k_start, last.k_stop)
        return FlashCall(rows, cols, (window[0], window[1]), q_bounds, k_bounds)
