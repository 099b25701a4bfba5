"""How many multiprocessors our kernels leave to NCCL, whose sends and receives are kernels too.

None by default: messages are posted before the kernel, which hands out its tiles one by one, so that it needs no SM
that they hold. On 2 H200s, forward, none left against 8: 95 against 92% of the ideal at 32k tokens a GPU, 94 against 89
at 16k, 84 against 81 at 8k, 64 against 65 at 4k. (A prototype with fixed tiles had wanted 8 to 32.) The backward's
kernels take one CTA a tile, so that messages get an SM whenever a tile ends. These are figures of a ring of hops. Where
keys are gathered by heads the CTAs of the next section may take what one leaves; not measured.
"""

from __future__ import annotations

import torch

_comm_sms = 0


def set_comm_sms(num_sms: int) -> None:
    """SMs that the forward of impl "hopper" leaves free over NCCL, default 0; other transports need none."""
    global _comm_sms
    if not isinstance(num_sms, int) or num_sms < 0:
        raise ValueError(f"num_sms must be 0 or more multiprocessors, got {num_sms!r}; the default is 0.")
    _comm_sms = num_sms


def comm_sms(impl: str, transport: str | None) -> int:
    """SMs left free by a call."""
    return _comm_sms if (impl, transport) == ("hopper", "nccl") else 0


def kernel_options(impl: str, transport: str | None, device: torch.device) -> dict[str, int]:
    """The SMs a forward kernel may use, where it shares them with messages."""
    left = comm_sms(impl, transport)
    if not left:
        return {}
    return {"num_sms": max(1, torch.cuda.get_device_properties(device).multi_processor_count - left)}
