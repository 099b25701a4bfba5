"""Assertions of this tier's workers, which import nothing of `tests`: trainers install a package of that name."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

# A trainer's own model computes norms and rotary embeddings in fp32: these are roundings of a few such layers.
RTOL = 16 * torch.finfo(torch.float32).eps


def assert_gradients_equal(pairs: Iterable[tuple[str, torch.Tensor, torch.Tensor]]) -> None:
    """Compare each (name, gradient, gradient of one process) by the norm of their difference."""
    for name, got, want in pairs:
        error = ((got - want).norm() / want.norm()).item()
        assert error <= RTOL, f"{name} differs by {error:.1e}"


def assert_refused(call: Callable[[], object], message: str, kind: type[Exception] = NotImplementedError) -> None:
    """Assert that every rank raises the same error, whose message has `message`."""
    try:
        call()
        text = "no error"
    except kind as error:
        text = str(error)
    texts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    assert all(message in text for text in texts), texts
