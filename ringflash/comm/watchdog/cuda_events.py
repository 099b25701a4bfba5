"""Whether the device has come to an event, asked from a thread beside the one that works.

Through the driver, not torch: torch's `Event.query` holds Python's lock, and a driver that is busy with a
synchronisation may answer late. And a process that captures a CUDA graph forbids such a question to all its threads
(CUDA invalidates the capture) but those that said that they know what they do.
"""

from __future__ import annotations

import ctypes

import torch

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_SUCCESS, _NOT_READY = 0, 600


class DeviceLost(RuntimeError):
    """The device failed; the next call of the working thread will say how."""


class Events:
    """Made in the thread that asks.

    Args:
        device: of the events.
    Raises:
        OSError: there is no driver.
        DeviceLost: it answers with an error.
    """

    def __init__(self, device: torch.device) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        handle, context, mode = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_int(_RELAXED)
        _check(self._driver.cuDeviceGet(ctypes.byref(handle), ctypes.c_int(device.index)))
        _check(self._driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle))
        _check(self._driver.cuCtxSetCurrent(context))
        _check(self._driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)))

    def ended(self, event: torch.cuda.Event) -> bool:
        """Raises DeviceLost."""
        code = self._driver.cuEventQuery(ctypes.c_void_p(event.cuda_event))
        return False if code == _NOT_READY else _check(code)


def _check(code: int) -> bool:
    if code != _SUCCESS:
        raise DeviceLost(f"CUDA error {code}")
    return True
