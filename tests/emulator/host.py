"""Lets launchers run on CPU tensors: what they ask of CUDA is answered for a Hopper GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import torch


@contextlib.contextmanager
def cuda_properties(num_sms: int) -> Iterator[None]:
    """A compute capability 9.0 device with `num_sms` SMs, whose streams and guards do nothing."""
    properties = SimpleNamespace(multi_processor_count=num_sms, major=9, minor=0)
    answers = {
        "get_device_properties": lambda *_: properties,
        "get_device_capability": lambda *_: (9, 0),
        "current_device": lambda: 0,
        "device": lambda *_: contextlib.nullcontext(),
        "current_stream": lambda *_: SimpleNamespace(cuda_stream=0, synchronize=lambda: None),
        "is_current_stream_capturing": lambda: False,
    }
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        yield
