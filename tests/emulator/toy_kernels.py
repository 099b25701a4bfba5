"""Small kernels that use, and with a planted fault misuse, every synchronisation the emulator models."""

from ringflash_kernels.hopper.compat import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    named_barrier,
    tma_load,
    tma_reduce_add,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def load_tiles(a_desc, b_desc, smem_a, smem_b, full, empty, num_tiles, STAGES: gl.constexpr):
    for i in range(num_tiles):
        s = i % STAGES
        mbarrier.wait(empty.index(s), ((i // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(s), a_desc.block_type.nbytes + b_desc.block_type.nbytes)
        tma_load(a_desc, [0, i * 64], full.index(s), smem_a.index(s))
        tma_load(b_desc, [i * 64, 0], full.index(s), smem_b.index(s))


@gluon.jit
def multiply_tiles(out_desc, smem_a, smem_b, smem_out, full, empty, num_tiles, STAGES: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    total = gl.zeros([64, 64], gl.float32, layout)
    for i in range(num_tiles):
        s = i % STAGES
        mbarrier.wait(full.index(s), (i // STAGES) & 1)
        total = warpgroup_mma(smem_a.index(s), smem_b.index(s), total, is_async=True)
        total = warpgroup_mma_wait(0, deps=(total,))
        mbarrier.arrive(empty.index(s), count=1)
    smem_out.store(total)
    fence_async_shared()
    tma_reduce_add(out_desc, [gl.program_id(0) * 64, 0], smem_out)
    tma_store_wait(0)
    smem_out.store(total * 0.0)


@gluon.jit
def matmul(a_desc, b_desc, out_desc, num_tiles, STAGES: gl.constexpr):
    """Adds a @ b, of shape (64, 64 * num_tiles) and (64 * num_tiles, 64), to every 64 rows of out."""
    smem_a = gl.allocate_shared_memory(a_desc.dtype, [STAGES, 64, 64], a_desc.layout)
    smem_b = gl.allocate_shared_memory(b_desc.dtype, [STAGES, 64, 64], b_desc.layout)
    smem_out = gl.allocate_shared_memory(gl.float32, [64, 64], out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    gl.warp_specialize(
        [
            (multiply_tiles, (out_desc, smem_a, smem_b, smem_out, full, empty, num_tiles, STAGES)),
            (load_tiles, (a_desc, b_desc, smem_a, smem_b, full, empty, num_tiles, STAGES)),
        ],
        [1],
        [24],
    )


@gluon.jit
def early_read(a_desc, out_desc):
    """Copies a tile through shared memory."""
    smem = gl.allocate_shared_memory(a_desc.dtype, [64, 64], a_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(full.index(0), count=1)
    mbarrier.expect(full.index(0), a_desc.block_type.nbytes)
    tma_load(a_desc, [0, 0], full.index(0), smem)
    mbarrier.wait(full.index(0), 0)
    tma_store(out_desc, [0, 0], smem)
    tma_store_wait(0)


@gluon.jit
def ping(counter, ID: gl.constexpr):
    named_barrier(0, ID, 256, True)
    gl.atomic_add(counter, 1)


@gluon.jit
def pong(counter, ID: gl.constexpr):
    named_barrier(0, ID, 256, False)
    gl.atomic_add(counter + 1, 1)


@gluon.jit
def ping_pong(counter):
    gl.warp_specialize([(ping, (counter, 8)), (pong, (counter, 8))], [4], [24])


@gluon.jit
def integers(out, x, big):
    """Stores what the device computes for negative division, and an offset into a large tensor."""
    gl.store(out, x // 64)
    gl.store(out + 1, x % 64)
    gl.store(out + 2, (big.to(gl.int64) * 64 // big).to(gl.int32))


@gluon.jit
def sums(out, x, n, BLOCK: gl.constexpr):
    offsets = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, layout=gl.BlockedLayout([1], [32], [4], [0]))
    values = gl.load(x + offsets, mask=offsets < n, other=0.0)
    gl.atomic_add(out, gl.sum(values, 0))
