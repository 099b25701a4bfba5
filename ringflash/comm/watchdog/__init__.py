"""The watch: rings that run ahead of their host end with an error that names rank and place, not with a silent hang.

    with watching(transport, "backward", device) as call:
        ...
        call.reach(token, "for section {}", section)     what the device is to come to, in this order

Over gloo the host waits itself, and raises. Elsewhere it only gives work to the device, and a device that waits for
another rank waits without a word. One daemon thread of each process therefore looks at what its calls have reached.
Where nothing moves for `ringflash.set_timeout`, it asks the other ranks of the group, says on every one of them who
waits for what, and ends the process. docs/decisions/0007-watch.md says why so.

    calls    what was issued, and how far the device came
    events   asks the device, from a thread
    board    what ranks tell one another when one of them is stuck
    thread   looks, decides, reports, ends
"""

from ringflash.comm.watchdog.calls import Call, Unwatched
from ringflash.comm.watchdog.thread import END_S, RingStalled, Watch, watching

__all__ = ["END_S", "Call", "RingStalled", "Unwatched", "Watch", "watching"]
