"""The kernels a user's calls compile: production launchers on small CPU tensors, their launches recorded.

What a kernel begins with, what it ends with and its mask are different parts of its code, so they are not crossed: a
forward resumes, and a backward stores, under one mask. Calls without a mask, whose loop those with one contain as well,
fp16, fp32 results of a forward and records for the peers are at head_dim 128 only; dk and dv in fp32 and the dq of a
second hop there and at 256.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from ringflash_kernels.hopper import gather_scatter
from ringflash_kernels.hopper.backward import host as backward
from ringflash_kernels.hopper.forward import host as forward
from ringflash_kernels.hopper.forward.tiles import FORWARD_TILES
from ringflash_kernels.hopper.fp8 import backward as fp8_backward
from ringflash_kernels.hopper.fp8 import forward as fp8_forward
from ringflash_kernels.hopper.fp8 import quantise
from ringflash_kernels.hopper.launcher import Launcher
from ringflash_kernels.mask import Mask, Region
from tests.compile.compiler import Launch, Recorder, recorded_launches
from tests.two_sided.forests import Forest
from tests.two_sided.kernel_masks import mask_of

HEAD_DIMS = (64, 96, 128, 192, 256)
NARROW = (192, 128)  # of q and k, and of v
HEAD_DIMS_OF_FP8 = (64, 128, 256)
_TOKENS = 256
_FOREST = Forest((64, 96, 96), (-1, 0, 0), (False,) * 3)
_MASKS = {
    "full": Mask.full(_TOKENS, _TOKENS),
    "band": Mask.band(_TOKENS, _TOKENS, causal=True),
    "bands": Mask.of(_TOKENS, _TOKENS, [Region(0, 128, 0, 128, upper=0), Region(128, _TOKENS, 0, _TOKENS, upper=0)]),
    "bounds": Mask.documents([0, 100, _TOKENS]),
    "ends": mask_of(_FOREST),
    "ends window": mask_of(replace(_FOREST, left=50)),
    "ends down": mask_of(replace(_FOREST, lengths=(64, 100, 92))),
}


def production_launches() -> list[Launch]:
    """Every distinct kernel, labelled with the call that uses it."""
    with recorded_launches() as recorder:
        for head_dim in HEAD_DIMS:
            _forwards(recorder, head_dim)
            _backwards(recorder, head_dim)
        _narrow(recorder)
        _forward(recorder, 128, "band", torch.float16)
        _backward(recorder, 128, "band", torch.float16)
        _exchange(recorder, 128)
        for head_dim in HEAD_DIMS_OF_FP8:
            for products in ("fp8_scores", "fp8") if head_dim <= 128 else ("bf16", "fp8"):
                _fp8_backward(recorder, head_dim, products)
        for head_dim in HEAD_DIMS_OF_FP8:
            _fp8(recorder, head_dim)
    return list(recorder.launches.values())


def _forwards(recorder: Recorder, head_dim: int) -> None:
    for mask in _masks(head_dim):
        if mask != "bands" or FORWARD_TILES[head_dim].skips:
            _forward(recorder, head_dim, mask)
    for mask in ("band", "ends"):
        _forward(recorder, head_dim, mask, resume=True)
    for resume in (False, True) if head_dim == 128 else ():
        _forward(recorder, head_dim, "band", out_dtype=torch.float32, resume=resume)
    if head_dim == 128:
        _forward(recorder, head_dim, "ends", mha=True)  # a tile of one head


def _masks(head_dim: int) -> list[str]:
    return [*_MASKS] if head_dim == 128 else ["band", "bands", "bounds", "ends"]


def _narrow(recorder: Recorder) -> None:
    for mask in ("band", "bounds", "ends"):
        _forward(recorder, NARROW, mask)
        _backward(recorder, NARROW, mask)
        _backward(recorder, NARROW, mask, deterministic=True)
    _backward(recorder, NARROW, "ends window")
    _forward(recorder, NARROW, "band", resume=True)
    for deterministic in (False, True):
        _backward(recorder, NARROW, "band", accumulate=False, deterministic=deterministic)
    _backward(recorder, NARROW, "band", only_dq=True, deterministic=True)
    _exchange(recorder, NARROW)


def forward_launch(module: ModuleType, head_dim: int, mask: str) -> Launch:
    """The launch of a fresh bf16 call with the `forward_kernel` of a module."""
    with mock.patch.object(forward, "_LAUNCHER", Launcher(module.forward_kernel)):
        return _launch_of("forward_kernel", _forward, head_dim, mask)


def dq_launch(head_dim: int, mask: str) -> Launch:
    return _launch_of("backward_queries", _backward, head_dim, mask)


def keys_launch(head_dim: int, mask: str) -> Launch:
    """The launch of dK and dV, and of dQ up to head_dim 128."""
    return _launch_of("backward_keys", _backward, head_dim, mask)


def fp8_keys_launch(head_dim: int) -> Launch:
    """The launch of all gradients with every product in e4m3."""
    return _launch_of("backward_keys_fp8", _fp8_backward, head_dim, "fp8")


def publish_launch(module: ModuleType) -> Launch:
    return _launch_of("_publish", _exchange, 128, module)


def _launch_of(name: str, call: Callable[..., None], *arguments: Any) -> Launch:
    """The first launch of the kernel of this name in a call."""
    with recorded_launches() as recorder:
        call(recorder, *arguments)
    return next(x for x in recorder.launches.values() if x.name == name)


def _forward(
    recorder: Recorder,
    head_dim: int | tuple[int, int],
    mask: str,
    dtype: torch.dtype = torch.bfloat16,
    *,
    out_dtype: torch.dtype | None = None,
    resume: bool = False,
    mha: bool = False,
) -> None:
    words = [_label(head_dim), str(dtype)[6:], mask, "resume" * resume, "fp32 out" if out_dtype else "", "mha" * mha]
    recorder.variant = " ".join(word for word in words if word)
    (q, k), (out, v) = (_operands(width, dtype) for width in _widths(head_dim))
    k, v = (q, out) if mha else (k, v)
    out = torch.empty(out.shape, dtype=out_dtype or dtype)
    lse = torch.empty(q.shape[0], q.shape[2], _TOKENS)
    acc = torch.empty(out.shape) if resume else None
    forward.forward(q, k, v, _MASKS[mask], 1.0, out=out, lse=lse, acc=acc)


def _backwards(recorder: Recorder, head_dim: int) -> None:
    for mask in ("band", "bounds", "ends", "ends window"):
        _backward(recorder, head_dim, mask)
    with mock.patch.object(backward, "_SHORT_MASKED", 1.0):  # its blocks are all masked
        _backward(recorder, head_dim, "ends down")
    if head_dim <= 128:
        patches = {"_PART_BLOCKS": 1, "_EARLY_PART_BLOCKS": 1, "_is_cut": lambda *_: True}
        with mock.patch.multiple(backward, **patches):
            _backward(recorder, head_dim, "ends window", accumulate=False, parts=True)
    if head_dim == 128:
        with mock.patch.multiple(backward, **patches, _BESIDE_TOGETHER=1, _L2_BYTES_PER_SECTION=1):
            _backward(recorder, head_dim, "ends window", accumulate=False, parts=True, only_dq=True)
    _backward(recorder, head_dim, "band", accumulate=False)
    if head_dim == 128:
        _backward(recorder, head_dim, "band", accumulate=False, short=True)
        _backward(recorder, head_dim, "band", only_dq=True)
    if head_dim in (128, 256):
        _backward(recorder, head_dim, "band", accumulate=False, out_dtype=torch.float32)
    if head_dim == 192:
        _backward(recorder, head_dim, "band", only_dq=True)
    if head_dim == 256:
        _backward(recorder, head_dim, "band", hops=2)
    for mask in ("band", "bounds", "ends") if head_dim == 128 else ("band",):
        _backward(recorder, head_dim, mask, deterministic=True)


def _backward(
    recorder: Recorder,
    head_dim: int | tuple[int, int],
    mask: str,
    dtype: torch.dtype = torch.bfloat16,
    *,
    accumulate: bool = True,
    out_dtype: torch.dtype | None = None,
    deterministic: bool = False,
    hops: int = 1,
    only_dq: bool = False,
    parts: bool = False,
    short: bool = False,
) -> None:
    words = [
        _label(head_dim),
        str(dtype)[6:],
        mask,
        "in parts" if parts else "" if accumulate else "store",
        "short" if short else "",
        "only dq" if only_dq else "",
        "fp32 out" if out_dtype else "",
        "deterministic" if deterministic else "",
    ]
    recorder.variant = " ".join(word for word in words if word)
    (q, k), (out, v) = (_operands(width, dtype) for width in _widths(head_dim))
    k, v = (k, v) if accumulate else (q, out)  # one KV head for each query head: stored without an fp32 buffer
    lse = torch.empty(q.shape[0], q.shape[2], _TOKENS)
    scale = 1 / math.sqrt(q.shape[3])
    options = {"deterministic": deterministic, "only_dq": torch.empty_like(q) if only_dq else None}
    run = backward.HopperBackward(out, q, out, lse, softmax_scale=scale, **options)
    out_dtype = torch.float32 if accumulate else out_dtype or dtype
    dk, dv = (torch.empty(x.shape, dtype=out_dtype) for x in (k, v))
    with mock.patch.object(backward, "_SHORT_ROWS", _TOKENS if short else 0):
        run.add(k, v, _MASKS[mask], dk, dv, accumulate=accumulate)
        for _ in range(1, hops):
            recorder.variant = " ".join(word for word in (*words, "second hop") if word)
            run.add(k, v, _MASKS[mask], dk, dv, accumulate=accumulate)
    run.finish(options["only_dq"])


def _fp8_backward(recorder: Recorder, head_dim: int, products: str) -> None:
    q, k = _operands(head_dim, torch.bfloat16)
    lse = torch.empty(q.shape[0], q.shape[2], _TOKENS)
    row_max = lse if products == "fp8" else None

    def backward_of(keys: torch.Tensor, num_keys: int | None = _TOKENS) -> fp8_backward.Fp8Backward:
        return fp8_backward.Fp8Backward(
            q, q, q, lse, num_kv_heads=keys.shape[2], softmax_scale=1.0, products=products, row_max=row_max,
            num_keys=num_keys,
        )  # fmt: skip

    for mask in ("band", "bounds", "ends", "ends window"):
        recorder.variant = f"hd{head_dim} {products} {mask}"
        run = backward_of(k)
        dk, dv = (torch.empty(k.shape) for _ in range(2))
        run.add(k, k, _MASKS[mask], dk, dv)
        recorder.variant += " second hop"
        run.add(k, k, _MASKS[mask], dk, dv)
        recorder.variant = f"hd{head_dim} {products} {mask}"
        run.finish()
    if products == "fp8":
        recorder.variant = f"hd{head_dim} {products} band fp32 dq"
        run = backward_of(k, num_keys=None)
        run.add(k, k, _MASKS["band"], dk, dv)
        run.finish()
    overwritten = [(torch.bfloat16, q), (torch.float32, q)]  # each KV head has one query head
    for dtype, keys in [*overwritten, (torch.bfloat16, k)]:  # heads of a group add to the same bf16 sums
        recorder.variant = f"hd{head_dim} {products} band {'added' if keys is k else 'overwritten'} {str(dtype)[6:]}"
        dk, dv = (torch.empty(keys.shape, dtype=dtype) for _ in range(2))
        run = backward_of(keys)
        run.add(keys, keys, _MASKS["band"], dk, dv, accumulate=False)
    if products == "fp8" and head_dim != 128:
        recorder.variant = f"hd{head_dim} {products} band in parts"
        dk, dv = (torch.empty(q.shape, dtype=torch.bfloat16) for _ in range(2))
        with mock.patch.object(fp8_backward, "_PROMOTE", 2):
            backward_of(q).add(q, q, _MASKS["band"], dk, dv, accumulate=False)


def _exchange(recorder: Recorder, head_dim: int | tuple[int, int], module: ModuleType = gather_scatter) -> None:
    recorder.variant = f"{_label(head_dim)} bfloat16 sum over ranks"
    widths = _widths(head_dim)
    own, others = torch.zeros(1, _TOKENS, 2, sum(widths)), torch.zeros(3 * _TOKENS, 2, sum(widths))
    dk, dv = (torch.empty(1, _TOKENS, 2, width, dtype=torch.bfloat16) for width in widths)
    module.collect(own, others, torch.zeros(4, _TOKENS, dtype=torch.int32), dk, dv)
    recorder.variant = f"{_label(head_dim)} bfloat16 to the peers"
    lines, there = torch.zeros(2, 2, dtype=torch.int64), torch.arange(_TOKENS, dtype=torch.int32)
    module.publish(dk, dv, torch.zeros(dk.numel() + dv.numel(), dtype=dk.dtype), lines, there, _TOKENS)


def _fp8(recorder: Recorder, head_dim: int) -> None:
    q, k = _operands(head_dim, torch.bfloat16)
    recorder.variant = f"hd{head_dim} bfloat16"
    rows = quantise.quantise_q(q)
    recorder.variant = f"hd{head_dim} bfloat16 dequantised"
    quantise.dequantised_q(q)
    for for_backward in (False, True):
        recorder.variant = f"hd{head_dim} bfloat16" + (" for the backward" if for_backward else "")
        records = quantise.quantise_kv(k, k, for_backward=for_backward)
    if head_dim == 128:
        recorder.variant = f"hd{head_dim} bfloat16 to the peers"
        numbers = torch.arange(records[..., 0].numel()).view(records.shape[:3])
        quantise.quantise_kv(k, k, for_backward=True, out=records.flatten(0, 2), numbers=numbers)
    for mask, resume in [*((mask, False) for mask in _masks(head_dim)), ("band", True), ("ends", True)]:
        recorder.variant = f"hd{head_dim} {mask}" + (" resume fp32 out" if resume else "")
        out = torch.empty(q.shape, dtype=torch.float32 if resume else q.dtype)
        lse = torch.empty(q.shape[0], q.shape[2], _TOKENS)
        acc = torch.empty(q.shape) if resume else None
        fp8_forward.forward(rows, records, _MASKS[mask], 1.0, out=out, lse=lse, acc=acc)


def _widths(head_dim: int | tuple[int, int]) -> tuple[int, int]:
    return (head_dim, head_dim) if isinstance(head_dim, int) else head_dim


def _label(head_dim: int | tuple[int, int]) -> str:
    return "hd" + "/".join(map(str, dict.fromkeys(_widths(head_dim))))


def _operands(head_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.zeros(2, _TOKENS, heads, head_dim, dtype=dtype) for heads in (4, 2))
