"""Device values on the CPU: tensors and scalars with Triton's types, and bounds-checked pointers.

Integer semantics are the device's, not Python's: `//` and `%` truncate toward zero, and int32 arithmetic that
leaves the range raises instead of wrapping, which is how a 32-bit offset into a large tensor is caught.
"""

from __future__ import annotations

import functools
import operator
from functools import partial
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import torch

from ringflash_kernels.hopper.compat import gl

_NUMPY = {
    "fp64": np.float64, "fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16,
    "fp8e4nv": ml_dtypes.float8_e4m3fn, "fp8e5": ml_dtypes.float8_e5m2, "int64": np.int64, "int32": np.int32,
    "int16": np.int16, "int8": np.int8, "uint64": np.uint64, "uint32": np.uint32, "uint16": np.uint16,
    "uint8": np.uint8, "int1": np.bool_,
}  # fmt: skip
_STORED = {name: np.dtype(stored) for name, stored in _NUMPY.items()}
_FLOATS = ("fp64", "fp32", "fp16", "bf16", "fp8e4nv", "fp8e5")
_KINDS = {name: 2 if name in _FLOATS else 0 if name == "int1" else 1 for name in _NUMPY}
_BITS_VIEW = {1: torch.uint8, 2: torch.uint16, 4: torch.int32, 8: torch.int64}


class EmulationError(AssertionError):
    """The kernel did something that is undefined, or would hang, on the device."""


def numpy_dtype(dtype) -> np.dtype:
    """The numpy type that stores values of a Gluon `dtype`."""
    return _STORED[dtype.name]


def gluon_dtype(dtype: torch.dtype):
    names = {torch.bool: "int1", torch.float8_e4m3fn: "float8e4nv"}
    return getattr(gl, names.get(dtype, str(dtype).removeprefix("torch.")))


def poison(dtype: np.dtype) -> object:
    """Content of undefined memory of a numpy `dtype`: NaN, or an integer far outside any index."""
    if dtype == np.bool_:
        return True
    if not np.issubdtype(dtype, np.integer):
        return np.nan
    limits = np.iinfo(dtype)
    return (limits.min or limits.max) // 3


def is_float(dtype) -> bool:
    return dtype.name in _FLOATS


def _kind(dtype) -> int:
    return _KINDS[dtype.name]


def _literal_dtype(value):
    if isinstance(value, (bool, np.bool_)):
        return gl.int1
    if isinstance(value, (int, np.integer)):
        return gl.int32 if -(2**31) <= value < 2**31 else gl.int64
    return gl.float32


def result_dtype(a, b):
    """Triton's computation type of two operands, each a Tensor or a Python number."""
    a_dtype = a.dtype if isinstance(a, Tensor) else _literal_dtype(a)
    b_dtype = b.dtype if isinstance(b, Tensor) else _literal_dtype(b)
    if isinstance(a, Tensor) != isinstance(b, Tensor):
        tensor, literal = (a_dtype, b_dtype) if isinstance(a, Tensor) else (b_dtype, a_dtype)
        if _kind(literal) <= _kind(tensor):
            return tensor
    if _kind(a_dtype) != _kind(b_dtype):
        return a_dtype if _kind(a_dtype) > _kind(b_dtype) else b_dtype
    if a_dtype.name == b_dtype.name:
        return a_dtype
    if is_float(a_dtype) and a_dtype.primitive_bitwidth == b_dtype.primitive_bitwidth:
        return gl.float32  # fp16 with bf16
    return a_dtype if a_dtype.primitive_bitwidth >= b_dtype.primitive_bitwidth else b_dtype


def as_numpy(value, dtype=None) -> np.ndarray:
    """The stored array of a Tensor or number, converted to a Gluon `dtype` where one is given."""
    data = value.data if isinstance(value, Tensor) else np.asarray(value)
    return data if dtype is None else data.astype(numpy_dtype(dtype), copy=False)


def integer(value) -> int:
    """The Python integer of a scalar."""
    return int(value.data) if isinstance(value, Tensor) else int(value)


def truth(value) -> bool:
    return bool(value.data) if isinstance(value, Tensor) else bool(value)


class Tensor:
    """A register tensor, or, with no dimension, a run-time scalar."""

    __slots__ = ("data", "dtype")
    __array_ufunc__ = None  # numpy operands defer to the operators below

    def __init__(self, data, dtype) -> None:
        self.data = np.asarray(data, numpy_dtype(dtype))
        self.dtype = dtype

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    @property
    def type(self) -> SimpleNamespace:
        return SimpleNamespace(layout=None, shape=self.shape, scalar=self.dtype, element_ty=self.dtype)

    def __repr__(self) -> str:
        return f"{self.dtype}{self.shape}" if self.shape else f"{self.dtype}({self.data})"

    def __bool__(self) -> bool:
        if self.data.ndim:
            raise EmulationError(f"branch on a tensor of shape {self.shape}")
        return bool(self.data)

    def __index__(self) -> int:
        return int(self.data)

    def __hash__(self) -> int:
        return id(self)

    def __getitem__(self, key) -> Tensor:
        keys = key if isinstance(key, tuple) else (key,)
        if any(k is not None and k != slice(None) for k in keys):
            raise EmulationError(f"device tensors only take `:` and `None` as subscripts, got {key}")
        return Tensor(self.data[key], self.dtype)

    def to(self, dtype, bitcast: bool = False) -> Tensor:
        data = self.data
        if bitcast:
            return Tensor(data.view(numpy_dtype(dtype)), dtype)
        if is_float(self.dtype) and not is_float(dtype):
            data = np.trunc(np.nan_to_num(data.astype(np.float64)))
        if dtype.name == "fp8e4nv":  # the device saturates, infinity too; NaN stays NaN
            data = np.clip(data.astype(np.float32), -448.0, 448.0)
        return Tensor(data.astype(numpy_dtype(dtype)), dtype)

    def reshape(self, *shape) -> Tensor:
        return Tensor(self.data.reshape(_dims(shape)), self.dtype)

    def permute(self, *order) -> Tensor:
        return Tensor(np.ascontiguousarray(self.data.transpose(_dims(order))), self.dtype)

    trans = permute

    def broadcast_to(self, *shape) -> Tensor:
        return Tensor(np.broadcast_to(self.data, _dims(shape)), self.dtype)

    def split(self) -> tuple[Tensor, Tensor]:
        assert self.data.shape[-1] == 2, "split needs a last dimension of 2"
        return Tensor(self.data[..., 0].copy(), self.dtype), Tensor(self.data[..., 1].copy(), self.dtype)

    def sum(self, axis=None) -> Tensor:
        return reduce_sum(self, axis)

    def max(self, axis=None) -> Tensor:
        """Maximum that skips NaN, as the device's does."""
        return Tensor(np.fmax.reduce(self.data, axis), self.dtype)


def _dims(dims) -> tuple[int, ...]:
    return tuple(int(d) for d in (dims[0] if len(dims) == 1 and isinstance(dims[0], (list, tuple)) else dims))


def arithmetic(function, a, b) -> Tensor:
    """`function(a, b)` in the computation type, int32 results checked for overflow."""
    dtype = result_dtype(a, b)
    if dtype.name == "int32" and _is_scalar(a) and _is_scalar(b):  # as below, many times faster
        number = _OF_INTEGERS.get(function, function)(integer(a), integer(b))
        if not -(2**31) <= number < 2**31:
            raise _overflow(dtype, function, number)
        return Tensor(number, dtype)
    if is_float(dtype):
        return Tensor(function(as_numpy(a, dtype), as_numpy(b, dtype)), dtype)
    wide = np.asarray(function(as_numpy(a).astype(np.int64), as_numpy(b).astype(np.int64)))
    if dtype.name == "int1":
        return Tensor(wide != 0, dtype)
    if dtype.name != "int64" and wide.size:
        low, high = _limits(dtype.name)
        if wide.min() < low or wide.max() > high:
            raise _overflow(dtype, function, wide.max())
    return Tensor(wide.astype(numpy_dtype(dtype)), dtype)


@functools.cache
def _limits(name: str) -> tuple[int, int]:
    stored = np.iinfo(_STORED[name])
    return int(stored.min), int(stored.max)


def _is_scalar(value) -> bool:
    return value.data.ndim == 0 if isinstance(value, Tensor) else isinstance(value, int)


def _overflow(dtype, function, number) -> EmulationError:
    return EmulationError(f"{dtype} overflow: {getattr(function, '__name__', function)} gives {number}")


def reduce_sum(x: Tensor, axis=None) -> Tensor:
    """Sum over `axis`, bf16 in fp32 as Triton does."""
    if is_float(x.dtype):
        return Tensor(x.data.sum(axis, dtype=np.float32), gl.float32)
    return Tensor(x.data.sum(axis, dtype=np.int64), gl.int64 if x.dtype == gl.int64 else gl.int32)


def _truncated_quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if np.any(b == 0):
        raise EmulationError("integer division by zero")
    return np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))


def _truncated_remainder(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a - _truncated_quotient(a, b) * b


def _integer_quotient(a: int, b: int) -> int:
    if b == 0:
        raise EmulationError("integer division by zero")
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


_OF_INTEGERS = {
    np.maximum: max,
    np.minimum: min,
    _truncated_quotient: _integer_quotient,
    _truncated_remainder: lambda a, b: a - _integer_quotient(a, b) * b,
}


def _true_quotient(a, b) -> Tensor:
    dtype = result_dtype(a, b)
    dtype = dtype if is_float(dtype) else gl.float32
    return Tensor(as_numpy(a, dtype) / as_numpy(b, dtype), dtype)


def _compare(function, a, b) -> Tensor:
    dtype = result_dtype(a, b)
    if dtype.name == "int32" and _is_scalar(a) and _is_scalar(b):
        return Tensor(function(integer(a), integer(b)), gl.int1)
    return Tensor(function(as_numpy(a, dtype), as_numpy(b, dtype)), gl.int1)


def _define_operators() -> None:
    arithmetics = {
        "add": operator.add, "sub": operator.sub, "mul": operator.mul, "floordiv": _truncated_quotient,
        "mod": _truncated_remainder, "lshift": operator.lshift, "rshift": operator.rshift, "and": operator.and_,
        "or": operator.or_, "xor": operator.xor,
    }  # fmt: skip
    numbers = (Tensor, int, float, np.number, np.bool_)

    def binary(evaluate, reflected: bool):
        def method(self, other):
            if not isinstance(other, numbers):
                return NotImplemented
            return evaluate(other, self) if reflected else evaluate(self, other)

        return method

    for name, function in arithmetics.items():
        for reflected in (False, True):
            setattr(Tensor, f"__{'r' if reflected else ''}{name}__", binary(partial(arithmetic, function), reflected))
    Tensor.__truediv__ = binary(_true_quotient, False)
    Tensor.__rtruediv__ = binary(_true_quotient, True)
    for name in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(Tensor, f"__{name}__", binary(partial(_compare, getattr(operator, name)), False))
    Tensor.__neg__ = lambda self: arithmetic(operator.sub, 0, self)
    Tensor.__invert__ = lambda self: Tensor(~self.data, self.dtype)


_define_operators()


class Pointer:
    """Addresses of elements in the storage of one host tensor; every access is checked against that storage."""

    __array_ufunc__ = None

    def __init__(self, storage: np.ndarray, dtype, offset: np.ndarray) -> None:
        self.storage, self.element_dtype, self.offset = storage, dtype, offset
        self.dtype = self.type = SimpleNamespace(element_ty=dtype, scalar=SimpleNamespace(element_ty=dtype))

    @classmethod
    def to_tensor(cls, tensor: torch.Tensor) -> Pointer:
        """The address of the first element of a host `tensor`."""
        storage = as_array(torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0))
        return cls(storage, gluon_dtype(tensor.dtype), np.int64(tensor.storage_offset()))

    def __add__(self, other) -> Pointer:
        return Pointer(self.storage, self.element_dtype, self.offset + as_numpy(other).astype(np.int64))

    __radd__ = __add__

    def __sub__(self, other) -> Pointer:
        return Pointer(self.storage, self.element_dtype, self.offset - as_numpy(other).astype(np.int64))

    def __getitem__(self, key) -> Pointer:
        return Pointer(self.storage, self.element_dtype, self.offset[key])

    def locate(self, mask=None) -> tuple[np.ndarray, np.ndarray]:
        """(offsets, enabled) of an access under `mask`, enabled offsets checked."""
        offset = np.asarray(self.offset)
        enabled = np.asarray(True if mask is None else as_numpy(mask))
        offset, enabled = np.broadcast_arrays(offset, enabled)
        used = offset[enabled]
        if used.size and (used.min() < 0 or used.max() >= self.storage.size):
            raise EmulationError(f"access at element {used.min()}..{used.max()} of a storage of {self.storage.size}")
        return offset, enabled

    def load(self, mask=None, other=None) -> Tensor:
        offset, enabled = self.locate(mask)
        dtype = numpy_dtype(self.element_dtype)
        fill = np.asarray(poison(dtype) if other is None else as_numpy(other)).astype(dtype)
        return Tensor(np.where(enabled, self.storage[np.where(enabled, offset, 0)], fill), self.element_dtype)

    def store(self, value, mask=None) -> None:
        offset, enabled = self.locate(mask)
        stored = np.broadcast_to(as_numpy(value, self.element_dtype), offset.shape)
        self.storage[offset[enabled]] = stored[enabled]


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """A numpy view of a CPU tensor, low-precision types included, that shares its memory and strides."""
    tensor = tensor.detach()
    bits = tensor if tensor.dtype == torch.bool else tensor.view(_BITS_VIEW[tensor.itemsize])
    return bits.numpy().view(numpy_dtype(gluon_dtype(tensor.dtype)))
