"""How many multiprocessors our kernels leave to NCCL, whose sends and receives are kernels too.

A forward kernel that holds every SM until it ends keeps the next hop's messages waiting. Beside the NCCL ring of a
prototype on 8 H200s, 8 free SMs of 132 were best at 16k and 32k tokens a GPU, 32 at 8k; not measured with the kernels
of today. The backward's kernels take one CTA a tile, so that messages get an SM whenever a tile ends.
"""

from __future__ import annotations

_comm_sms = 8


def set_comm_sms(num_sms: int) -> None:
    """SMs that the forward of impl "hopper" leaves free over NCCL, default 8; other transports need none."""
    global _comm_sms
    if num_sms < 0:
        raise ValueError(f"num_sms must be 0 or more, got {num_sms}; the default is 8.")
    _comm_sms = num_sms


def comm_sms(impl: str, transport: str | None) -> int:
    """SMs left free by a call."""
    return _comm_sms if (impl, transport) == ("hopper", "nccl") else 0
