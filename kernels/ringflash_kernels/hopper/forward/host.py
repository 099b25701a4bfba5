"""Launch of the forward kernel: checks, tile tables and descriptors, and the list of compiled variants."""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from threading import Lock
from typing import NamedTuple

import torch

from ringflash_kernels.api import device_guard
from ringflash_kernels.hopper.compat import TensorDescriptor
from ringflash_kernels.hopper.descriptors import cut, misaligned, tile_descriptor
from ringflash_kernels.hopper.environment import check_environment
from ringflash_kernels.hopper.forward.kernel import ForwardVariant, forward_kernel
from ringflash_kernels.hopper.forward.tiles import FORWARD_TILES, ForwardTiles
from ringflash_kernels.hopper.launcher import Launcher
from ringflash_kernels.mask import Mask, Region, check_capture

_FAR = 1 << 30  # farther than any band reaches; sums with a row number stay within int32
_LN2 = math.log(2.0)
# K and V of the heads that run side by side should stay in L2 (50 MB); larger groups measured slower.
_L2_BYTES_OF_A_GROUP = 16 * 2**20


class ForwardConfig(NamedTuple):
    """One compiled variant: what a call's inputs select.

    Args:
        mask: "none" (one region without a band), "band" (one region with one) or "bounds" (several regions).
        resume: the call passes `acc`.
        out_dtype: dtype of `out`, that of q where None.
    """

    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    mask: str = "band"
    resume: bool = False
    out_dtype: torch.dtype | None = None


_LAUNCHER = Launcher(forward_kernel)


class Launch(NamedTuple):
    """A kernel launch: what tells its compiled variant apart, number of programs, arguments of `forward_kernel`."""

    variant: tuple
    num_programs: int
    arguments: tuple


def unsupported(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
    """Why this implementation cannot take the call; None when it can."""
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"dtype {q.dtype} (fp16 or bf16)"
    if q.shape[-1] not in FORWARD_TILES:
        return f"head_dim {q.shape[-1]} (one of {', '.join(map(str, FORWARD_TILES))})"
    if q.device.type != "cuda":
        return f"device {q.device.type} (cuda)"
    if torch.cuda.get_device_capability(q.device) != (9, 0):
        return f"compute capability {torch.cuda.get_device_capability(q.device)} (9, 0)"
    for name, x in (("q", q), ("k", k), ("v", v)):
        problem = misaligned(x)
        if problem is not None:
            return f"{name} with {problem}; make it contiguous"
    return None


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
    num_sms: int | None = None,
) -> None:
    """Attention over the visible pairs of `mask`, continuing the state (acc, lse) of other keys where given.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim), bf16 or fp16; any strides that are multiples of 16 bytes, the
            last 1; likewise k, v, out and acc.
        k, v: (batch, seqlen_k, num_kv_heads, head_dim).
        out: as q, in the dtype of q or fp32; every row is written. May be `acc`.
        lse: (batch, num_heads, seqlen_q), fp32, last stride 1: written without `acc`, updated with it.
        acc: as q, fp32. A row that sees nothing keeps its state.
        num_sms: multiprocessors to use; default all of them.
    Raises:
        ValueError: a scale that is not positive, or out, acc or lse with strides TMA cannot address.
    Numerics: scores and state in fp32, P rounded to the dtype of q for P V; out is cast once.
    Source: online softmax over tiles, Dao et al. 2022 (arXiv:2205.14135) and Shah et al. 2024 (arXiv:2407.08608);
        resuming from (acc, lse) in the epilogue is ours.
    """
    check_state(softmax_scale, out, lse, acc)
    first, stop = mask.q_span
    settle(out, lse, acc, slice(0, first))
    settle(out, lse, acc, slice(stop, q.shape[1]))
    if first < stop:
        with device_guard(q.device):
            launch = plan(q, k, v, mask, softmax_scale, out=out, lse=lse, acc=acc,
                          num_sms=num_sms or count_sms(q.device), counter=tile_counter(q.device))  # fmt: skip
            _LAUNCHER(launch.variant, launch.num_programs, *launch.arguments)


def plan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Mask,
    softmax_scale: float,
    *,
    out: torch.Tensor,
    lse: torch.Tensor,
    acc: torch.Tensor | None,
    num_sms: int,
    counter: torch.Tensor,
) -> Launch:
    """The launch that covers the rows of `mask.q_span`; one region is cut out of q, k and v as views.

    Args:
        counter: two int32 zeros, zeros again after the launch.
    """
    rows, keys = mask.q_span, (0, mask.seqlen_k)
    if len(mask.regions) == 1:
        region = mask.regions[0]
        keys = (region.k_start, region.k_stop)
        start = stop = table = None
        lower, upper = band_of(region)
        kind = "none" if region.lower is None and region.upper is None else "band"
    else:
        kind, lower, upper = "bounds", 0, 0
        start, stop = (bound[slice(*rows)] for bound in mask.bounds(q.device))
    q, out, lse, acc = cut(q, 1, rows), cut(out, 1, rows), cut(lse, 2, rows), cut(acc, 1, rows)
    k, v = cut(k, 1, keys), cut(v, 1, keys)
    variant = _variant(FORWARD_TILES[q.shape[3]], kind, acc is not None)
    if kind == "bounds":
        table = tile_table(mask, q.device, variant.tiles.rows, rows)
    batch, seqlen_q, num_heads, head_dim = q.shape
    seqlen_k, num_kv_heads = k.shape[1], k.shape[2]
    num_row_tiles = -(-seqlen_q // variant.tiles.rows)
    num_tiles = batch * num_heads * num_row_tiles
    heads_per_kv = num_heads // num_kv_heads
    arguments = (
        *_descriptors(q, k, v, out, out if acc is None else acc, variant.tiles),
        lse, start, stop, table, counter,
        seqlen_q, seqlen_k, num_heads, heads_per_kv,
        heads_per_kv * kv_heads_per_group(num_kv_heads, seqlen_k * head_dim * 2 * k.element_size()),
        num_row_tiles, num_tiles, lower, upper, lse.stride(0), lse.stride(1),
        softmax_scale / _LN2, variant,
    )  # fmt: skip
    return Launch((head_dim, kind, acc is not None, q.dtype, out.dtype), min(num_sms, num_tiles), arguments)


def warmup(configs: Iterable[ForwardConfig], report: Callable[[str], None] | None = None) -> None:
    """Compile the given variants for the current device, so that no training step waits for a compiler.

    Args:
        report: called with the name and the seconds of each variant when it is ready.
    """
    check_environment()
    device = torch.device("cuda", torch.cuda.current_device())
    tile_counter(device)
    for config in configs:
        began = time.perf_counter()
        launch = example(config, device)
        forward_kernel.warmup(*launch.arguments, grid=(1,), num_warps=4)
        if report is not None:
            report(f"forward {describe(config)}: {time.perf_counter() - began:.1f} s")


def example(config: ForwardConfig, device: torch.device | str = "cpu") -> Launch:
    """A launch over two tokens that selects the variant of `config`; for compiling, also without a GPU."""
    x = torch.empty(1, 2, 1, config.head_dim, dtype=config.dtype, device=device)
    return plan(
        x, x, x, _EXAMPLES[config.mask], 1.0,
        out=x.to(config.out_dtype or config.dtype),
        lse=torch.empty(1, 1, 2, device=device),
        acc=x.float() if config.resume else None,
        num_sms=1,
        counter=torch.zeros(2, dtype=torch.int32, device=device),
    )  # fmt: skip


def all_configs(dtype: torch.dtype = torch.bfloat16) -> Iterator[ForwardConfig]:
    """Every variant of a dtype: head sizes, masks, a fresh or resumed state, results in fp32 or the dtype."""
    for head_dim, mask in itertools.product(FORWARD_TILES, _EXAMPLES):
        for resume, out_dtype in itertools.product((False, True), (dtype, torch.float32)):
            yield ForwardConfig(head_dim, dtype, mask, resume, out_dtype)


def describe(config: ForwardConfig) -> str:
    """A config in a few words."""
    out_dtype = config.out_dtype or config.dtype
    words = [f"hd{config.head_dim}", str(config.dtype)[6:], config.mask, f"to {str(out_dtype)[6:]}"]
    return " ".join([*words, "resuming"] if config.resume else words)


_EXAMPLES = {
    "none": Mask.full(2, 2),
    "band": Mask.band(2, 2, causal=True),
    "bounds": Mask.documents([0, 1, 2]),
}


def check_state(softmax_scale: float, out: torch.Tensor, lse: torch.Tensor, acc: torch.Tensor | None) -> None:
    if not softmax_scale > 0:
        raise ValueError(f"softmax_scale must be positive for impl='hopper', got {softmax_scale}; use impl='flash2'.")
    if lse.stride(2) != 1:
        raise ValueError(f"lse must have last stride 1, got {lse.stride()}; make it contiguous.")
    for name, x in (("out", out), ("acc", acc)):
        problem = None if x is None else misaligned(x)
        if problem is not None:
            raise ValueError(f"{name} must be addressable by TMA, got {problem}; make it contiguous.")


def settle(out: torch.Tensor, lse: torch.Tensor, acc: torch.Tensor | None, rows: slice) -> None:
    """Rows that see nothing and that no launch covers: empty when fresh, unchanged (but cast) when resumed."""
    if rows.start == rows.stop:
        return
    if acc is None:
        out[:, rows] = 0
        lse[:, :, rows] = -math.inf
    elif acc is not out and acc.data_ptr() != out.data_ptr():
        out[:, rows] = acc[:, rows]


@functools.cache
def _variant(tiles: ForwardTiles, mask: str, resume: bool) -> ForwardVariant:
    return ForwardVariant(tiles, mask, resume)


def band_of(region: Region) -> tuple[int, int]:
    """(lower, upper) counted from the region's own first row and key."""
    shift = region.q_start - region.k_start
    lower = -_FAR if region.lower is None else region.lower + shift
    return lower, _FAR if region.upper is None else region.upper + shift


def _descriptors(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, acc: torch.Tensor, tiles: ForwardTiles
) -> tuple[TensorDescriptor | None, ...]:
    """Of q, k, v, out and acc: boxes of the first part of the head, then of the second where its width differs."""
    rows = (tiles.block_m, tiles.block_n, tiles.block_n, tiles.block_m, tiles.block_m)
    tensors = tuple(zip((q, k, v, out, acc), rows, strict=True))
    first = tuple(tile_descriptor(x, n, tiles.parts[0]) for x, n in tensors)
    if len(set(tiles.parts)) == 1:
        return *first, *(None,) * 5
    return *first, *(tile_descriptor(x, n, tiles.parts[1]) for x, n in tensors)


def kv_heads_per_group(num_kv_heads: int, kv_bytes_per_head: int) -> int:
    """Largest divisor of num_kv_heads whose K and V fit the share of L2."""
    count = max(1, min(num_kv_heads, _L2_BYTES_OF_A_GROUP // kv_bytes_per_head))
    while num_kv_heads % count:
        count -= 1
    return count


def tile_table(mask: Mask, device: torch.device, rows_per_tile: int, rows: tuple[int, int]) -> torch.Tensor:
    """Row tiles of the rows [first, end), most keys first: (tiles, 8) int32, kept with the mask.

    Columns: tile, first visible key, first key of the rows' common part, its end, end of the visible keys.
    """
    key = ("forward_tiles", torch.device(device), rows_per_tile, rows)
    return mask.cached(key, lambda: _new_tile_table(mask, device, rows_per_tile, rows))


def _new_tile_table(mask: Mask, device: torch.device, rows_per_tile: int, rows: tuple[int, int]) -> torch.Tensor:
    check_capture(device)
    start, stop = (bound[slice(*rows)] for bound in mask.bounds(device))
    empty = start == stop

    def extreme(values: torch.Tensor, of_empty: int, of_padding: int, reduce: str) -> torch.Tensor:
        values = values.masked_fill(empty, of_empty)
        values = torch.nn.functional.pad(values, (0, -len(values) % rows_per_tile), value=of_padding)
        return getattr(values.view(-1, rows_per_tile), reduce)(1)

    first_key = extreme(start, _FAR, _FAR, "amin")
    last_start = extreme(start, _FAR, 0, "amax")
    first_stop = extreme(stop, 0, _FAR, "amin")
    end_key = extreme(stop, 0, 0, "amax")
    first_key = torch.minimum(first_key, end_key)
    order = torch.argsort(end_key - first_key, descending=True, stable=True)
    columns = (torch.arange(len(order), device=device), first_key, last_start, first_stop, end_key)
    table = torch.stack([column.int() for column in columns], 1)[order]
    return torch.nn.functional.pad(table, (0, 3)).contiguous()


@functools.cache
def count_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


_STREAMS = 256


@functools.cache
def _counters(device: torch.device) -> tuple[tuple[torch.Tensor, ...], dict[int, int]]:
    zeros = torch.zeros(_STREAMS, 2, dtype=torch.int32, device=device)
    torch.cuda.current_stream(device.index).synchronize()  # or another stream's first launch may come before the zeros
    return zeros.unbind(), {}


def tile_counter(device: torch.device) -> torch.Tensor:
    """Two zeros for the tile counter of a launch. Launches side by side on two streams must not share them.

    A graph's launches have their own: it may be replayed beside other work of the stream that it was captured on.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(2, dtype=torch.int32, device=device)
    counters, slots = _counters(device)
    stream = torch.cuda.current_stream(device.index).cuda_stream
    slot = slots.get(stream)
    return counters[_new_slot(slots, stream) if slot is None else slot]


_slots_lock = Lock()


def _new_slot(slots: dict[int, int], stream: int) -> int:
    """The slot of a stream that had none; two threads with new streams must not be given the same one."""
    with _slots_lock:
        slot = slots.setdefault(stream, len(slots))
        if slot < _STREAMS:
            return slot
        del slots[stream]
    raise RuntimeError(
        f"kernels must be launched on at most {_STREAMS} streams of a device, got one more; reuse streams, as "
        "torch.cuda.Stream() does."
    )
