"""Watchdog: a stalled ring call ends with an error that names the rank at fault, not with a silent hang.

    with watching(transport, "backward", device) as call:
        ...
        call.reach(marker, "for section {}", section)     markers that the device passes, in this order

Over gloo the host itself waits, and raises. Over NCCL and the copy engine the host only issues work, and a device that
waits for another rank reports nothing. So one daemon thread per process polls the progress of its calls. README.md
explains who watches what, and docs/decisions/0007-watch.md why.

    calls         calls in flight, and the progress of the device in them
    cuda_events   queries of CUDA events from the watchdog thread
    store         messages between the watchdogs of a group
    thread        polls, detects a stall, reports it and ends the process
"""

from ringflash.comm.watchdog.calls import CallInFlight, Unwatched
from ringflash.comm.watchdog.thread import END_S, RingStalled, Watchdog, watching
