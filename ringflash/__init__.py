"""Exact ring attention for training on million-token sequences.

    out = ringflash.ring_attention(q, k, v, group=group)

The folder, lower layers first:

    comm/       agreement of the ranks before a call, transports (gloo, nccl, copy_engine), watchdog for stalled calls,
                meshes
    sequence/   tokens of each rank (layout), mask in global coordinates, documents by positions, padding, labels
    attention/  ring_attention: it all-gathers the K/V of a few heads at a time, while the kernel computes the previous
                heads
    recurrent/  gated delta rules, Mamba-2 and short convolutions over a sharded sequence
    loss.py     cross-entropy times cp_size, so that averaging gradients over all ranks (DDP, FSDP2, ZeRO) is right
    wrap/, huggingface/, accelerate/, lightning/, deepspeed/, megatron/, torchtitan/, compat/
                ring attention in your model and trainer
    checkpoint/, data/, memory/     checkpoint files, token files, activation memory
    verify/, testing/, commands/    comparison with dense attention, commands
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ringflash import loss
from ringflash.attention.api import Explanation, RingAttention, explain, ring_attention
from ringflash.attention.sinks import apply_sinks
from ringflash.comm.agreement import set_agreement_check
from ringflash.comm.modules.gradients import average_gradients
from ringflash.comm.timeouts import set_timeout
from ringflash.comm.transport import buffer_bytes, release_buffers
from ringflash.sequence.documents import cu_seqlens_from_positions
from ringflash.sequence.layout import document_table, granularity, local_positions, shard_sequence, unshard_sequence
from ringflash.sequence.padding import PaddedBatch, pad_sequence
from ringflash.sequence.trees import SharedPrefixes, share_prefixes, span_documents
from ringflash.version import __version__ as __version__

if TYPE_CHECKING:
    from ringflash.comm.modules.fsdp_units import align_units
    from ringflash.huggingface.log_probs import log_probs
    from ringflash.wrap import disable_ring, wrap_attention
    from ringflash.wrap.check import check_wrapped

__all__ = [
    "Explanation",
    "PaddedBatch",
    "RingAttention",
    "SharedPrefixes",
    "align_units",
    "apply_sinks",
    "average_gradients",
    "buffer_bytes",
    "check_wrapped",
    "cu_seqlens_from_positions",
    "disable_ring",
    "document_table",
    "explain",
    "granularity",
    "local_positions",
    "log_probs",
    "loss",
    "pad_sequence",
    "release_buffers",
    "ring_attention",
    "set_agreement_check",
    "set_timeout",
    "shard_sequence",
    "share_prefixes",
    "span_documents",
    "unshard_sequence",
    "wrap_attention",
]

# Imported on first access: they import torch._dynamo, which takes nearly as long as torch itself, or transformers.
_LAZY = {
    "align_units": "ringflash.comm.modules.fsdp_units",
    "check_wrapped": "ringflash.wrap",
    "disable_ring": "ringflash.wrap",
    "log_probs": "ringflash.huggingface.log_probs",
    "wrap_attention": "ringflash.wrap",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
