"""Exact ring attention for training on million-token sequences.

    out = ringflash.ring_attention(q, k, v, group=group)

The data path: `layout` (which tokens a rank holds) -> `schedule` (what it computes on each step) ->
`ring` (the loop) over `transport` (how K/V move) and `ringflash_kernels` (one device) -> `loss`.
"""

from ringflash import loss
from ringflash.agreement import set_agreement_check
from ringflash.api import Explanation, RingAttention, explain, ring_attention
from ringflash.layout import local_positions, shard_sequence, unshard_sequence
from ringflash.padding import PaddedBatch, pad_sequence
from ringflash.transport import buffer_bytes, release_buffers, set_timeout
from ringflash.transport.sms import set_comm_sms
from ringflash.wrap import wrap_attention
from ringflash.wrap_check import check_wrapped

__version__ = "0.1.0"

__all__ = [
    "Explanation",
    "PaddedBatch",
    "RingAttention",
    "buffer_bytes",
    "check_wrapped",
    "explain",
    "local_positions",
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
