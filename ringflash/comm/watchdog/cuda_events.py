"""Queries of CUDA events from the watchdog thread.

They call the driver directly, not torch, for two reasons. torch's `Event.query` holds the GIL, for a long time if the
driver is busy with a synchronisation. And while a CUDA graph is captured, a query by any thread of the process
invalidates the capture, unless that thread has switched to the relaxed capture mode.
"""

from __future__ import annotations

import ctypes

import torch

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_SUCCESS, _NOT_READY = 0, 600


class DeviceLost(RuntimeError):
    """Raised if the device has failed; the next CUDA call of the main thread reports how."""


class Events:
    """Event queries of one device; must be created in the thread that uses them.

    Raises:
        OSError: there is no driver.
        DeviceLost: the driver returned an error.
    """

    def __init__(self, device: torch.device) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        handle, context, mode = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_int(_RELAXED)
        _check(self._driver.cuDeviceGet(ctypes.byref(handle), ctypes.c_int(device.index)))
        _check(self._driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle))
        _check(self._driver.cuCtxSetCurrent(context))
        _check(self._driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)))

    def ended(self, event: torch.cuda.Event) -> bool:
        """Return True if the device has passed the event.

        Raises:
            DeviceLost: the driver returned an error.
        """
        code = self._driver.cuEventQuery(ctypes.c_void_p(event.cuda_event))
        return False if code == _NOT_READY else _check(code)


def _check(code: int) -> bool:
    if code != _SUCCESS:
        raise DeviceLost(f"CUDA error {code}")
    return True
