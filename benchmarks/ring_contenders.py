"""Contenders of bench_ring: ours by transport, the installed peers, and one device for the ideal.

A builder returns a call of (q, k, v) and its inputs, or a text that says why it does not support the row. All ranks
must reach the same answer: if only one rank skipped a contender, the others would hang.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

import ringflash
from benchmarks import flash_attn_4_as_2
from benchmarks.bench_kernels import document_bounds
from ringflash.comm import call_numbers
from ringflash.comm.transport import Pending, PointToPoint
from ringflash.comm.transport.copies import Copies
from ringflash.sequence.layout import chunks_of_rank
from ringflash_kernels.api import rounds

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
DOCUMENTS = {  # kinds of packed documents: fewest and most tokens, log-uniform
    "documents": (128, 1 << 15),
    "documents of 1k to 256k": (1 << 10, 1 << 18),
    "documents of 1k to 16k": (1 << 10, 1 << 14),
}


@dataclass(frozen=True)
class Row:
    """One line of the table. `kind`: causal, full, window, or a key of DOCUMENTS (these are causal, too)."""

    tokens_per_rank: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    kind: str

    def __str__(self) -> str:
        shape = f"{self.num_heads}/{self.num_kv_heads} heads of {self.head_dim}"
        return f"{self.tokens_per_rank} tokens a rank, {shape}, {self.kind}"


class Setting(NamedTuple):
    """A row, the state of this rank, and the kernel of our contenders."""

    row: Row
    group: dist.ProcessGroup
    device: torch.device
    dtype: torch.dtype
    impl: str = "auto"

    @property
    def name(self) -> str:
        """Name of the row, with the kernel if it is not exact."""
        return f"{self.row}, {self.impl}" if rounds(self.impl) else str(self.row)

    def inputs(
        self, *, whole: bool = False, num_kv_heads: int | None = None, head_ranks: int = 1
    ) -> tuple[torch.Tensor, ...]:
        """Draw q, k, v (normal) of this rank's tokens or of all, for one of `head_ranks` equal parts of the heads."""
        tokens = self.row.tokens_per_rank * (self.group.size() if whole else 1)
        keys = num_kv_heads or self.row.num_kv_heads
        return tuple(
            torch.randn(
                1, tokens, heads // head_ranks, self.row.head_dim, device=self.device, dtype=self.dtype,
                requires_grad=True,
            )
            for heads in (self.row.num_heads, keys, keys)
        )  # fmt: skip

    def mask(self) -> dict:
        """Return the mask arguments of ring_attention."""
        tokens = self.row.tokens_per_rank * self.group.size()
        if self.row.kind in DOCUMENTS:
            bounds = document_bounds(tokens, *DOCUMENTS[self.row.kind])
            return {"cu_seqlens": torch.tensor(bounds, dtype=torch.int32)}
        window = (min(8192, tokens // 4), 0) if self.row.kind == "window" else (-1, -1)
        return {"causal": self.row.kind != "full", "window_size": window}


class Built(NamedTuple):
    """A call and its inputs.

    Args:
        around: context manager for the call and its backward.
        captured: replay the call from a CUDA graph, without host time.
    """

    call: Attention
    inputs: tuple[torch.Tensor, ...]
    around: Callable[[], AbstractContextManager] = nullcontext
    captured: bool = False


def one_device(setting: Setting, head_ranks: int = 1) -> Built | str:
    """Build our kernel on the whole sequence, for one of `head_ranks` equal parts of the heads."""
    return Built(_ours(setting, None, "auto"), setting.inputs(whole=True, head_ranks=head_ranks))


def one_device_flash_attn_4(setting: Setting, head_ranks: int = 1) -> Built | str:
    """Build flash-attn-4 on the whole sequence, for one of `head_ranks` equal parts of the heads."""
    problem = _flash_attn_4_problem(setting)
    return problem or Built(_flash_attn_4(setting), setting.inputs(whole=True, head_ranks=head_ranks))


def by_heads(ideal: Callable[[Setting, int], Built | str]) -> Callable[[Setting], Built | str]:
    """Return the builder of `ideal` for a rank's share of the heads: the same work as its share of the sequence."""

    def build(setting: Setting) -> Built | str:
        size, row = setting.group.size(), setting.row
        if row.num_heads % size or row.num_kv_heads % size:
            return f"{row.num_heads}/{row.num_kv_heads} heads over {size} ranks"
        return ideal(setting, size)

    return build


def ours(transport: str, layout: str = "zigzag") -> Callable[[Setting], Built | str]:
    """Return the builder of ring_attention over a transport."""

    def build(setting: Setting) -> Built | str:
        able = ("gloo",) if setting.device.type == "cpu" else ("nccl", "copy_engine", "ulysses")
        if transport not in able:
            return f"does not carry tensors on {setting.device.type}"
        if transport == "ulysses" and setting.row.num_heads % setting.group.size():
            return f"{setting.row.num_heads} heads over {setting.group.size()} ranks"
        return Built(_ours(setting, setting.group, transport, layout), setting.inputs())

    return build


def for_documents(transport: str, layout: str) -> Callable[[Setting], Built | str]:
    """Return the builder of `ours` in a layout for packed documents."""

    def build(setting: Setting) -> Built | str:
        if setting.row.kind not in DOCUMENTS or setting.row.tokens_per_rank % chunks_of_rank(layout):
            return "is for documents, in chunks of a token at least"
        return ours(transport, layout)(setting)

    return build


def captured(transport: str) -> Callable[[Setting], Built | str]:
    """Return the builder of `ours`, replayed from CUDA graphs."""

    def build(setting: Setting) -> Built | str:
        if setting.device.type == "cpu":
            return "needs CUDA graphs"
        built = ours(transport)(setting)
        return built if isinstance(built, str) else built._replace(captured=True)

    return build


def ring_over(transport: str, setting: Setting) -> Built:
    """Build `ours`, or raise an error if it is not available."""
    built = ours(transport)(setting)
    if isinstance(built, str):
        raise ValueError(f"transport must carry tensors on {setting.device.type}, got {transport!r}; leave it out.")
    return built


@contextmanager
def _nothing_sent() -> Iterator[None]:
    """Post no messages, and compare no numbers of calls, which would have come with them."""
    with (
        mock.patch.object(PointToPoint, "post", lambda *_: Pending([])),
        mock.patch.object(call_numbers, "compare_later", lambda *_: None),
    ):
        yield


def kernels_alone(setting: Setting) -> Built | str:
    """Build `ours` without messages; the difference to NCCL is the cost of its communication. Results are wrong."""
    if rounds(setting.impl):
        return "is for K/V that travel as they are"
    transport = "gloo" if setting.device.type == "cpu" else "nccl"
    return Built(_ours(setting, setting.group, transport), setting.inputs(), _nothing_sent)


def _no_copies() -> AbstractContextManager:
    return mock.patch.object(Copies, "__call__", lambda _: None)


def without_copies(setting: Setting) -> Built | str:
    """Build `ours` over a copy engine that copies nothing, so links sleep. Results are wrong; the rest is timed."""
    built = ours("copy_engine")(setting)
    return built if isinstance(built, str) else built._replace(around=_no_copies)


def ulysses(setting: Setting) -> Built | str:
    """Build Ulysses: all-to-alls from tokens to heads and back, around flash-attn-4 or, without it, our kernel."""
    size, row = setting.group.size(), setting.row
    if row.num_kv_heads % size:
        return f"{row.num_kv_heads} KV heads over {size} ranks"
    local = _ours(setting, None, "auto") if _flash_attn_4_problem(setting) else _flash_attn_4(setting)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return _to_tokens(local(*(_to_heads(x, setting.group) for x in (q, k, v))), setting.group)

    return Built(call, setting.inputs())


def ring_flash_attention(setting: Setting) -> Built | str:
    """Build the zigzag ring of ring-flash-attention."""
    if setting.impl != "auto":
        return _EXACT
    if find_spec("ring_flash_attn") is None:
        return "not installed"
    if setting.row.kind not in ("causal", "full"):
        return f"not timed for {setting.row.kind}"
    flash_attn_4_as_2.provide()
    from ring_flash_attn import ring_flash_attn_func, zigzag_ring_flash_attn_func

    causal = setting.row.kind == "causal"
    attention = zigzag_ring_flash_attn_func if causal else ring_flash_attn_func
    return Built(lambda q, k, v: attention(q, k, v, causal=causal, group=setting.group), setting.inputs())


def torch_context_parallel(setting: Setting) -> Built | str:
    """Build torch's context_parallel around cuDNN's attention, with KV heads repeated because it does not support GQA.

    Its context must also cover the backward, and requires a buffer to shard.
    """
    if setting.device.type == "cpu":
        return "has no CPU kernel"
    if setting.impl != "auto":
        return _EXACT
    if setting.row.kind not in ("causal", "full"):
        return f"not timed for {setting.row.kind}"
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mesh, causal = DeviceMesh.from_group(setting.group, "cuda"), setting.row.kind == "causal"

    @contextmanager
    def around() -> Iterator[None]:
        sharded = torch.zeros(2 * setting.group.size(), device=setting.device)
        shards = context_parallel(mesh, buffers=[sharded], buffer_seq_dims=[0], no_restore_buffers={sharded})
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), shards:
            yield

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=causal).transpose(1, 2)

    return Built(call, setting.inputs(num_kv_heads=setting.row.num_heads), around)


_EXACT = "does not compute in the chosen impl"

IDEALS: dict[str, Callable[..., Built | str]] = {
    "one device, ringflash": one_device,
    "one device, flash-attn-4": one_device_flash_attn_4,
}
IDEALS_BY_HEADS = {f"{name}, a share of the heads": by_heads(build) for name, build in IDEALS.items()}
CONTENDERS: dict[str, Callable[[Setting], Built | str]] = {
    **{f"ringflash, {transport}": ours(transport) for transport in ("gloo", "nccl", "copy_engine", "ulysses")},
    "ringflash, copy_engine, CUDA graph": captured("copy_engine"),
    **{
        f"ringflash, {transport}, {layout}": for_documents(transport, layout)
        for layout in ("striped", "balanced")
        for transport in ("gloo", "copy_engine", "nccl")
    },
    "Ulysses": ulysses,
    "ring-flash-attention": ring_flash_attention,
    "torch context_parallel (MHA)": torch_context_parallel,
}


PROBES: dict[str, Callable[[Setting], Built | str]] = {
    "kernels alone": kernels_alone,
    "copy_engine, without copies": without_copies,
}


def _ours(setting: Setting, group: dist.ProcessGroup | None, transport: str, layout: str = "zigzag") -> Attention:
    options = {**setting.mask(), "layout": layout, "impl": setting.impl}

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = ringflash.ring_attention(q, k, v, group=group, transport=transport, **options)
        assert isinstance(out, torch.Tensor)
        return out

    return call


def _flash_attn_4_problem(setting: Setting) -> str:
    if setting.impl != "auto":
        return _EXACT
    if setting.device.type == "cpu" or find_spec("flash_attn") is None or find_spec("flash_attn.cute") is None:
        return "not installed"
    return "" if setting.row.kind in ("causal", "full") else f"not timed for {setting.row.kind}"


def _flash_attn_4(setting: Setting) -> Attention:
    from flash_attn.cute import flash_attn_func

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = flash_attn_func(q, k, v, causal=setting.row.kind == "causal")
        return out[0] if isinstance(out, tuple) else out

    return call


class _AllToAll(torch.autograd.Function):
    """Exchange of equal parts between all ranks; its gradient is the same exchange."""

    @staticmethod
    def forward(ctx: Any, sent: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return _AllToAll.forward(ctx, gradient.contiguous(), ctx.group), None


def _to_heads(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """(1, tokens / size, heads, head_dim) -> (1, tokens, heads / size, head_dim)."""
    size, (_, rows, heads, dim) = group.size(), x.shape
    sent = x.view(rows, size, heads // size, dim).transpose(0, 1).contiguous()
    received: torch.Tensor = _AllToAll.apply(sent, group)
    return received.view(1, size * rows, heads // size, dim)


def _to_tokens(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """(1, tokens, heads / size, head_dim) -> (1, tokens / size, heads, head_dim)."""
    size, (_, tokens, heads, dim) = group.size(), x.shape
    sent = x.reshape(size, tokens // size, heads, dim).contiguous()
    received: torch.Tensor = _AllToAll.apply(sent, group)
    return received.transpose(0, 1).reshape(1, tokens // size, size * heads, dim)
