"""One set of names for the Gluon operations that the kernels use, across triton releases.

Gluon is experimental and renames things between releases; nothing else in this package may import from
`triton.experimental`. `environment` says which releases were verified.
"""

from __future__ import annotations

from typing import Any

import triton
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared as fence_async_shared
from triton.experimental.gluon.language.nvidia.hopper import mbarrier as mbarrier
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma as warpgroup_mma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait as warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as TensorDescriptor
from triton.language.core import _aggregate


def aggregate(cls: type) -> Any:
    """Class decorator: make a class of device values whose constructor takes the annotated fields in order.

    Newer releases of triton generate this constructor themselves.
    """

    def construct(self: Any, *values: Any) -> None:
        for (name, kind), value in zip(cls.__annotations__.items(), values, strict=True):
            setattr(self, name, gl.constexpr(value) if kind is gl.constexpr else value)

    construct.__triton_builtin__ = True  # type: ignore[attr-defined]  # host code: triton must not compile it
    cls.__init__ = construct  # type: ignore[misc]
    return _aggregate(cls)


if hasattr(tma, "async_load"):
    tma_load, tma_store = tma.async_load, tma.async_store
else:  # triton 3.6 and 3.7; 3.9 has these names, but refuses to compile them
    tma_load, tma_store = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global
tma_store_wait = tma.store_wait


# From 3.9 on triton adds the offset of each product within an operand to the operand's address in 32 bits. If the
# operand stays in its place, these sums are computed before the loop, and take so many registers that each step spills.
MANY_ADDRESSES = gl.constexpr(tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9))


@gluon.jit
def hidden(x):
    """Return the number x, such that a buffer with this index has no address that is known before a loop."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], gl.int32, is_pure=False, pack=1)


@gluon.jit
def opaque(x):
    """Return the number x, hidden if addresses known before a loop would take too many registers."""
    if MANY_ADDRESSES:
        x = hidden(x)
    return x


@gluon.jit
def settled(x):
    """Return the fp32 tensor x, computed before any product that is issued later.

    From 3.9 on LLVM moves arithmetic behind products that do not need it, where the operands of both are alive at once.
    """
    if MANY_ADDRESSES:
        x = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], gl.float32, is_pure=False, pack=1)
    return x


@gluon.jit
def given(x):
    """Return the fp32 tensor x, to which a product adds; ptxas would end an earlier product before it sets x."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], gl.float32, is_pure=False, pack=1)


@builtin
def reinterpret(memory, dtype, shape, layout, _semantic=None):
    """Return a buffer with another type, shape and layout of its bytes (a method that triton 3.9 renames)."""
    method = memory.reinterpret if hasattr(memory, "reinterpret") else memory._reinterpret
    return method(dtype, shape, layout, _semantic=_semantic)


@gluon.jit
def start_of(memory, desc):
    """Return the start of a buffer as a tile of a descriptor (triton 3.8 reinterprets a buffer only as a whole)."""
    BITS: gl.constexpr = memory.numel * memory.dtype.primitive_bitwidth
    TILES: gl.constexpr = BITS // (8 * desc.block_type.nbytes)
    return reinterpret(memory, desc.dtype, [TILES] + desc.block_shape, desc.layout).index(0)


@builtin
def tma_reduce_add(desc, coord, smem, _semantic=None):
    """Add a tile of shared memory to global memory (triton has the operation, but no Python name for it before 3.8)."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, smem.handle)


@gluon.jit
def tma_store_complete(token):
    """Wait until this warp's TMA stores and reductions are in global memory, not only read as by `tma_store_wait`."""
    asm: gl.constexpr = "cp.async.bulk.wait_group 0; bar.warp.sync 0xffffffff; mov.b32 $0, $1;"
    return gl.inline_asm_elementwise(asm, "=r,r", [token], gl.int32, is_pure=False, pack=1)


@gluon.jit
def draw(pointer):
    """Add 1 to an int32 in global memory, by one warp, and return what it was.

    With triton's own addition, which hands its result on through shared memory, ptxas spilled in the other warps.
    """
    return of_lane(draw_later(pointer), 0)


@gluon.jit
def draw_later(pointer):
    """Like `draw`, but the number is in the first lane, and nothing waits for it before `of_lane`."""
    asm: gl.constexpr = """{
        .reg .pred first;
        .reg .b32 lane;
        mov.u32 lane, %laneid;
        setp.eq.u32 first, lane, 0;
        mov.b32 $0, 0;
        @first atom.global.add.u32 $0, [$1], 1;
    }"""
    return gl.inline_asm_elementwise(asm, "=&r,l", [pointer], gl.int32, is_pure=False, pack=1)


@gluon.jit
def load_lanes(pointer):
    """Load four int32 from global memory, by one warp, into a lane each; nothing waits for them before `of_lane`."""
    asm: gl.constexpr = """{
        .reg .b32 lane;
        .reg .b64 own;
        mov.u32 lane, %laneid;
        and.b32 lane, lane, 3;
        mad.wide.u32 own, lane, 4, $1;
        ld.global.b32 $0, [own];
    }"""
    return gl.inline_asm_elementwise(asm, "=r,l", [pointer], gl.int32, is_pure=False, pack=1)


@gluon.jit
def of_lane(number, LANE: gl.constexpr):
    """Return the number that a lane of the warp has."""
    asm: gl.constexpr = "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;"
    return gl.inline_asm_elementwise(asm, "=r,r,r", [number, LANE], gl.int32, is_pure=False, pack=1)


@gluon.jit
def count_up(pointer):
    """Add 1 to an int32 in global memory, by one warp. Readers that `wait_for` the sum see its earlier writes."""
    asm: gl.constexpr = """{
        .reg .pred first;
        .reg .b32 lane;
        fence.proxy.async.global;
        bar.warp.sync 0xffffffff;
        mov.u32 lane, %laneid;
        setp.eq.u32 first, lane, 0;
        @first red.release.gpu.global.add.u32 [$1], 1;
        mov.b32 $0, lane;
    }"""
    gl.inline_asm_elementwise(asm, "=r,l", [pointer], gl.int32, is_pure=False, pack=1)


@gluon.jit
def publish(pointer, number):
    """Store a number in global memory, by one warp. Readers that `wait_for` it see the earlier writes of this warp."""
    asm: gl.constexpr = "st.release.gpu.global.b32 [$1], $2; mov.b32 $0, $2;"
    gl.inline_asm_elementwise(asm, "=r,l,r", [pointer, number], gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_for(pointer, number):
    """Wait, by one warp, until `publish` has stored `number`; TMA stores and reductions issued later follow it."""
    asm: gl.constexpr = """{
        .reg .pred other;
        .reg .b32 found;
        again:
        ld.acquire.gpu.global.b32 found, [$1];
        setp.ne.b32 other, found, $2;
        @other bra again;
        fence.proxy.async.global;
        mov.b32 $0, found;
    }"""
    gl.inline_asm_elementwise(asm, "=r,l,r", [pointer, number], gl.int32, is_pure=False, pack=1)


@gluon.jit
def named_barrier(token, ID: gl.constexpr, NUM_THREADS: gl.constexpr, ARRIVE: gl.constexpr):
    """Arrive at hardware barrier ID, or wait for it; `token` only fixes the order. The compiler owns IDs 0 to 7."""
    if ARRIVE:
        asm: gl.constexpr = f"bar.arrive {ID}, {NUM_THREADS}; mov.b32 $0, $1;"
    else:
        asm: gl.constexpr = f"bar.sync {ID}, {NUM_THREADS}; mov.b32 $0, $1;"
    return gl.inline_asm_elementwise(asm, "=r,r", [token], gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _arrival(count, used, barrier, num_threads):
    """Return assembly that arrives at a hardware barrier once the first `used` of `count` registers are computed."""
    union = " ".join(f"mov.b32 next, ${i}; or.b32 all, all, next;" for i in range(1, used))
    asm = f"""{{
        .reg .b32 all, next;
        .reg .pred computed;
        mov.b32 all, $0;
        {union}
        setp.ge.s32 computed, all, 0;
        @computed bar.arrive {barrier}, {num_threads};
    }}"""
    return asm, ",".join(["=f"] * count + [str(i) for i in range(count)])


@gluon.jit
def arrive_after(x, COUNT: gl.constexpr, USED: gl.constexpr, ID: gl.constexpr, NUM_THREADS: gl.constexpr):
    """Arrive at hardware barrier ID when each thread has computed the first USED numbers of x; return x.

    ptxas moves an arrival past instructions that it does not depend on, each release to another place.

    Args:
        x: results of exp2, COUNT fp32 registers per thread. No sign bit is set, not even in NaN, so all threads arrive.
    """
    asm: gl.constexpr = _arrival(COUNT, USED, ID, NUM_THREADS)[0]
    held: gl.constexpr = _arrival(COUNT, USED, ID, NUM_THREADS)[1]
    return gl.inline_asm_elementwise(asm, held, [x], gl.float32, is_pure=False, pack=COUNT)


@gluon.constexpr_function
def _scaling(count):
    """Return assembly by which a warp scales `count` registers per thread, or skips it if all factors are 1.

    In a wgmma accumulator a thread's registers alternate in pairs between its two rows, r and r + 8, so the first four
    factors include both.
    """
    products = " ".join(f"mul.f32 ${i}, ${i}, ${2 * count + i};" for i in range(count))
    a, b = 2 * count, 2 * count + 2
    asm = f"""{{
        .reg .pred first, second;
        setp.neu.f32 first, ${a}, 0f3f800000;
        setp.neu.f32 second, ${b}, 0f3f800000;
        or.pred first, first, second;
        vote.sync.any.pred first, first, 0xffffffff;
        @!first bra end_of_scaling;
        {products}
        end_of_scaling:
    }}"""
    held = ",".join(["=f"] * count + [str(i) for i in range(count)] + ["f"] * count)
    return asm, held


@gluon.jit
def scale_unless_one(x, factor, COUNT: gl.constexpr):
    """Return x * factor; a warp skips the multiplications if all its factors are 1.

    Args:
        x: an accumulator of wgmma, COUNT fp32 registers per thread.
        factor: the factors of its rows, broadcast to the shape and layout of x.
    """
    asm: gl.constexpr = _scaling(COUNT)[0]
    held: gl.constexpr = _scaling(COUNT)[1]
    return gl.inline_asm_elementwise(asm, held, [x, factor], gl.float32, is_pure=True, pack=COUNT)


@gluon.jit
def seen_only(scores, row, end, key, stop):
    """Return scores where row < end and key < stop, elsewhere -inf. All have one shape.

    With one select for each score: triton would write one for each condition.
    """
    asm: gl.constexpr = """{
        .reg .pred p;
        setp.lt.s32 p, $2, $3;
        setp.lt.and.s32 p, $4, $5, p;
        selp.f32 $0, $1, 0fFF800000, p;
    }"""
    return gl.inline_asm_elementwise(
        asm, "=f,f,r,r,r,r", [scores, row, end, key, stop], gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def e4m3_of_bits(x):
    """Return numbers in e4m3 whose bits are max(x, 0) * 2^24, rounded to integers; NaN stays NaN.

    In fp16, numbers below 2^-13 are multiples of 2^-24, and their bits are the multiple.

    Args:
        x: fp32; four registers of a thread become one.
    """
    asm: gl.constexpr = """{
        .reg .b32 low, high;
        cvt.rn.relu.f16x2.f32 low, $2, $1;
        cvt.rn.relu.f16x2.f32 high, $4, $3;
        prmt.b32 $0, low, high, 0x6420;
    }"""
    return gl.inline_asm_elementwise(asm, "=r,f,f,f,f", [x], gl.float8e4nv, is_pure=True, pack=4)


@gluon.jit
def pairs_in_e4m3(low, high):
    """Return pairs of numbers in e4m3, saturated, as int16 with `low` in the lower byte.

    Args:
        low, high: fp32; two adjacent registers of each become one.
    """
    asm: gl.constexpr = """{
        .reg .b16 first, second;
        cvt.rn.satfinite.e4m3x2.f32 first, $3, $1;
        cvt.rn.satfinite.e4m3x2.f32 second, $4, $2;
        mov.b32 $0, {first, second};
    }"""
    return gl.inline_asm_elementwise(asm, "=r,f,f,f,f", [low, high], gl.int16, is_pure=True, pack=2)


@gluon.jit
def packed(x, dtype: gl.constexpr):
    """Return the fp32 tensor x in bf16 or fp16, two numbers a register, converted here.

    LLVM moves conversions to where their results are needed, and x keeps its registers until then.
    """
    if dtype == gl.bfloat16:
        asm: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
        bits = gl.inline_asm_elementwise(asm, "=r,f,f", [x], gl.bfloat16, is_pure=False, pack=2)
    else:
        asm: gl.constexpr = "cvt.rn.f16x2.f32 $0, $2, $1;"
        bits = gl.inline_asm_elementwise(asm, "=r,f,f", [x], gl.float16, is_pure=False, pack=2)
    return bits


@gluon.jit
def pairs_of(x, dtype: gl.constexpr):
    """Return pairs of adjacent columns of the fp32 tensor x as int32, converted to bf16 or fp16 here."""
    low, high = x.reshape([x.shape[0], x.shape[1] // 2, 2]).split()
    if dtype == gl.bfloat16:
        asm: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
    else:
        asm: gl.constexpr = "cvt.rn.f16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(asm, "=r,f,f", [low, high], gl.int32, is_pure=False, pack=1)


@gluon.jit
def columns_of(x, dtype: gl.constexpr):
    """Return the columns of which x has pairs."""
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [x], (gl.int16, gl.int16), is_pure=True, pack=1
    )
    columns = gl.join(low, high).reshape([x.shape[0], 2 * x.shape[1]])
    return columns.to(dtype, bitcast=True)


@gluon.jit
def unpacked(x):
    """Return the fp16 tensor x in fp32, converted here."""
    asm: gl.constexpr = """{
        .reg .b16 low, high;
        mov.b32 {low, high}, $2;
        cvt.f32.f16 $0, low;
        cvt.f32.f16 $1, high;
    }"""
    return gl.inline_asm_elementwise(asm, "=f,=f,r", [x], gl.float32, is_pure=False, pack=2)


@gluon.jit
def unfused_product(x, y):
    """Return x * y by a separate instruction, not fused, after which y needs no register."""
    y = y.broadcast_to(x.shape)
    return gl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], gl.float32, is_pure=False, pack=1)


@gluon.constexpr_function
def _maxima(count):
    """Return assembly that finds the largest of `count` registers for each of a thread's two rows, at the same time.

    Of the trees that triton makes from 3.8 on, one is finished before the other, and ptxas places exponentials of one
    row before the maxima of the other, for which they then wait (at head_dim 64 a kernel of 0.92 of the speed).
    """
    first, second = ([f"${count + i}" for i in range(count) if i % 4 // 2 == row] for row in (0, 1))
    steps = " ".join(f"max.f32 a, a, {x}; max.f32 b, b, {y};" for x, y in zip(first[1:], second[1:], strict=True))
    asm = f"""{{
        .reg .f32 a, b;
        mov.f32 a, {first[0]};
        mov.f32 b, {second[0]};
        {steps}
        mov.f32 $0, a;
        mov.f32 $2, b;
    }}"""
    return asm, ",".join(["=f"] * count + ["f"] * count)


@gluon.jit
def maxima_of_rows(x, COUNT: gl.constexpr):
    """Return each thread's maximum of a row in its first register of the row; the other registers are undefined.

    Args:
        x: an accumulator of wgmma, COUNT fp32 registers per thread.
    """
    asm: gl.constexpr = _maxima(COUNT)[0]
    held: gl.constexpr = _maxima(COUNT)[1]
    return gl.inline_asm_elementwise(asm, held, [x], gl.float32, is_pure=True, pack=COUNT)


@gluon.constexpr_function
def _largest(count):
    """Return assembly that finds the largest register of each row, 32 bits as integers, by instructions of three.

    Integers order floats that are not negative, with NaN above them; of negative ones the least integer is the largest.
    """
    rows = [[f"${count + i}" for i in range(count) if i % 4 // 2 == row] for row in (0, 1)]

    def chain(operation, row, result):
        first, *others = rows[row]
        return f"mov.b32 {result}, {first};" + "".join(f"{operation}.s32 {result}, {result}, {x};" for x in others)

    asm = f"""{{
        .reg .b32 a, b, c, d;
        .reg .pred any;
        {chain("max", 0, "a")}
        {chain("max", 1, "b")}
        min.s32 c, a, b;
        setp.lt.s32 any, c, 0;
        vote.sync.any.pred any, any, 0xffffffff;
        @!any bra end_of_largest;
        .reg .pred first, second;
        {chain("min", 0, "c")}
        {chain("min", 1, "d")}
        setp.lt.s32 first, a, 0;
        setp.lt.s32 second, b, 0;
        selp.b32 a, c, a, first;
        selp.b32 b, d, b, second;
        end_of_largest:
        mov.b32 $0, a;
        mov.b32 $2, b;
    }}"""
    return asm, ",".join(["=r"] * count + ["r"] * count)


@gluon.jit
def largest_of_rows(x, COUNT: gl.constexpr):
    """Return each thread's largest number of a row in its first register of the row; the other registers are undefined.

    Args:
        x: an accumulator of wgmma, COUNT fp32 registers per thread.
    """
    asm: gl.constexpr = _largest(COUNT)[0]
    held: gl.constexpr = _largest(COUNT)[1]
    bits = gl.inline_asm_elementwise(asm, held, [x.to(gl.int32, bitcast=True)], gl.int32, is_pure=True, pack=COUNT)
    return bits.to(gl.float32, bitcast=True)
