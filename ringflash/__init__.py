"""Exact ring attention for training on million-token sequences.

    out = ringflash.ring_attention(q, k, v, group=group)

The data path: `layout` (which tokens a rank holds) -> `schedule` (what it computes on each step) ->
`ring` (the loop) over `transport` (how K/V move) and `ringflash_kernels` (one device) -> `loss`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ringflash import loss
from ringflash.attention.api import Explanation, RingAttention, explain, ring_attention
from ringflash.comm.agreement import set_agreement_check
from ringflash.comm.timeouts import set_timeout
from ringflash.comm.transport import buffer_bytes, release_buffers
from ringflash.comm.transport.sms import set_comm_sms
from ringflash.sequence.layout import local_positions, shard_sequence, unshard_sequence
from ringflash.sequence.padding import PaddedBatch, pad_sequence

if TYPE_CHECKING:
    from ringflash.huggingface.log_probs import log_probs
    from ringflash.wrap import wrap_attention
    from ringflash.wrap.check import check_wrapped

__version__ = "0.1.0"

__all__ = [
    "Explanation",
    "PaddedBatch",
    "RingAttention",
    "buffer_bytes",
    "check_wrapped",
    "explain",
    "local_positions",
    "log_probs",
    "loss",
    "pad_sequence",
    "release_buffers",
    "ring_attention",
    "set_agreement_check",
    "set_comm_sms",
    "set_timeout",
    "shard_sequence",
    "unshard_sequence",
    "wrap_attention",
]

# Imported when they are asked for: with them comes torch._dynamo, which takes nearly as long as torch itself.
_LATER = {
    "check_wrapped": "ringflash.wrap",
    "log_probs": "ringflash.huggingface.log_probs",
    "wrap_attention": "ringflash.wrap",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)
