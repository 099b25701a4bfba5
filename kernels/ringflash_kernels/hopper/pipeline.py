"""Frame that the bf16 and the FP8 forward share: tiles and tickets, the ring of K and V, masks, turns and the epilogue.

Functions are given a variant V: `ForwardVariant` or `Fp8Variant`.
"""

from __future__ import annotations

from typing import NamedTuple

from ringflash_kernels.hopper.compat import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    named_barrier,
    opaque,
    scale_unless_one,
    seen_only,
    start_of,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
)


class Problem(NamedTuple):
    """Run-time numbers of a launch, the same for every program.

    Args:
        heads_per_group: query heads whose tiles are launched together, because their K/V fit in the L2 cache.
        heads_at_last: heads of the last group; all others are whole groups.
        num_row_tiles, num_tiles: tiles of a head, and of all heads and sequences.
        lower, upper: of a band: row i sees the keys from i + lower to i + upper.
        split, jump: of two bands: rows from `split` on see `jump` more keys.
        lse_stride_b, lse_stride_h: elements.
        scale: softmax_scale * log2(e).
    """

    seqlen_q: int
    seqlen_k: int
    num_heads: int
    heads_per_kv: int
    heads_per_group: int
    heads_at_last: int
    num_row_tiles: int
    num_tiles: int
    lower: int
    upper: int
    split: int
    jump: int
    lse_stride_b: int
    lse_stride_h: int
    scale: float


class Pointers(NamedTuple):
    """Global memory reached without TMA.

    Args:
        start, stop: the keys that each row sees; under a two-sided mask for the rows of whole tiles.
        ends: the end of each key in whole blocks, where shared memory has no room for those of a block.
        table, stretches: tiles and stretches of `hopper.walks`; without stretches see `tile_table`.
    """

    lse: int
    start: int
    stop: int
    ends: int
    table: int
    stretches: int
    counter: int


class Barriers(NamedTuple):
    """mbarriers: the warp that fills a buffer signals `full`, the warpgroups that have read it signal `empty`."""

    q_full: object
    q_empty: object
    k_full: object
    k_empty: object
    v_full: object
    v_empty: object
    acc_full: object
    ticket_full: object
    ticket_empty: object


class Tile(NamedTuple):
    """One program's piece of work: its first row and key, and its key blocks, walked from last to first.

    Block j begins at key + j * block_n. Some row of the warpgroup sees the blocks [first_seen, end_seen); every row
    sees all of [first_full, end_full). Under a two-sided mask the blocks are those of `num_stretches` stretches, of
    which `stretch` is the last.
    """

    batch: int
    head: int
    row: int
    key: int
    num_blocks: int
    first_seen: int
    first_full: int
    end_full: int
    end_seen: int
    stretch: int = 0
    num_stretches: int = 0


class QueryRows(NamedTuple):
    """Query rows of a warpgroup: the keys [start, stop) that each row sees, and the scale of exp2.

    Under a two-sided mask start and stop are read only where they are needed, from the first row's on.
    """

    start: object
    stop: object
    scale: float
    first: int


# ---------------------------------------------------------------------------------------------- work and masks


@gluon.jit
def place_of(ticket, problem):
    """Return batch, head and rank of a ticket's tile. Tickets are numbered in the order of the launch.

    Groups of heads are outermost in this order; in a group, tiles from the longest to the shortest; of a tile, the
    heads of the group. `rank` is the tile's index in the order of length. If a tile has several heads, one of these
    sets counts as a head.
    """
    last = problem.num_tiles - problem.heads_at_last * problem.num_row_tiles
    per_group = problem.heads_per_group * problem.num_row_tiles
    first = gl.where(ticket < last, ticket // per_group * per_group, last)
    heads = gl.where(ticket < last, problem.heads_per_group, problem.heads_at_last)
    rank = (ticket - first) // heads
    batch_head = first // problem.num_row_tiles + ticket - first - rank * heads
    batch = batch_head // problem.num_heads
    return batch, batch_head - batch * problem.num_heads, rank


@gluon.jit
def two_sided_tile(ticket, problem, pointers, CFG: gl.constexpr):
    """Return first row, number of blocks, last stretch and number of stretches of a ticket's tile."""
    _batch, _head, rank = place_of(ticket, problem)
    entry = pointers.table + rank * 4
    num_stretches = gl.load(entry + 2)
    return gl.load(entry) * CFG.rows, gl.load(entry + 3), gl.load(entry + 1) + num_stretches - 1, num_stretches


@gluon.jit
def stop_of(rows, problem, CFG: gl.constexpr):
    """Return, for each row, the key after the last one that the row's band holds."""
    stop = rows + problem.upper + 1
    if CFG.mask == "bands":
        stop = gl.where(rows < problem.split, stop, stop + problem.jump)
    return stop


@gluon.jit
def decode(ticket, problem, pointers, FIRST: gl.constexpr, COUNT: gl.constexpr, CFG: gl.constexpr):
    """Return the tile of a ticket. Its bounds of blocks are those of its rows [FIRST, FIRST + COUNT).

    Each of these rows sees all keys from `last_start` to `first_stop`, so the blocks in between need no mask.
    """
    ROWS: gl.constexpr = CFG.tiles.rows
    BN: gl.constexpr = CFG.tiles.block_n
    batch, head, rank = place_of(ticket, problem)
    row = (problem.num_row_tiles - 1 - rank) * ROWS
    if CFG.mask == "ends":
        row, num_blocks, stretch, num_stretches = two_sided_tile(ticket, problem, pointers, CFG)
        return Tile(batch, head, row, 0, num_blocks, 0, 0, num_blocks, num_blocks, stretch, num_stretches)
    if CFG.mask == "none":
        first_key = batch * 0
        last_start = first_key
        first_stop = problem.seqlen_k
        end_key = problem.seqlen_k
    elif CFG.is_band:
        last_row = gl.minimum(row + ROWS, problem.seqlen_q) - 1
        first_key = gl.maximum(row + problem.lower, 0)
        end_key = gl.minimum(stop_of(last_row, problem, CFG), problem.seqlen_k)
        last_start = gl.minimum(row + FIRST + COUNT - 1, last_row) + problem.lower
        first_stop = gl.minimum(stop_of(row + FIRST, problem, CFG), problem.seqlen_k)
    else:
        entry = pointers.table + rank * 8
        row = gl.load(entry) * CFG.rows
        first_key = gl.load(entry + 1)
        last_start = gl.load(entry + 2)
        first_stop = gl.load(entry + 3)
        end_key = gl.load(entry + 4)
    if CFG.tiles.aligned:
        first_key = first_key // BN * BN
    num_blocks = (gl.maximum(end_key - first_key, 0) + BN - 1) // BN
    first_seen = num_blocks * 0
    end_seen = num_blocks
    if CFG.is_band and CFG.tiles.skips:
        own_last_row = gl.minimum(row + FIRST + COUNT - 1, last_row)
        own_end_key = gl.where(row + FIRST <= last_row, stop_of(own_last_row, problem, CFG), 0)
        end_seen = gl.minimum((gl.maximum(own_end_key - first_key, 0) + BN - 1) // BN, num_blocks)
        first_seen = gl.minimum(gl.maximum(row + FIRST + problem.lower - first_key, 0) // BN, end_seen)
    first_full = gl.minimum((gl.maximum(last_start - first_key, 0) + BN - 1) // BN, end_seen)
    end_full = gl.minimum(gl.maximum(gl.maximum(first_stop - first_key, 0) // BN, first_full), end_seen)
    return Tile(batch, head, row, first_key, num_blocks, first_seen, first_full, end_full, end_seen, 0, 0)


@gluon.jit
def visible_keys(rows, problem, pointers, CFG: gl.constexpr):
    """Return start, stop: each row sees the keys [start, stop)."""
    if CFG.mask == "none":
        start = rows * 0
        stop = start + problem.seqlen_k
    elif CFG.is_band:
        start = rows + problem.lower
        stop = gl.minimum(stop_of(rows, problem, CFG), problem.seqlen_k)
    elif CFG.mask == "ends":  # see `hide`
        start = 0
        stop = 0
    else:
        inside = rows < problem.seqlen_q
        start = gl.load(pointers.start + rows, mask=inside, other=0)
        stop = gl.load(pointers.stop + rows, mask=inside, other=0)
    return start, stop


@gluon.jit
def slot(count, SIZE: gl.constexpr):
    """Return index and phase of the count-th use of a ring of SIZE buffers."""
    if SIZE == 2:
        index = count & 1
    else:
        index = count % SIZE
    return index, (count // SIZE) & 1


@gluon.jit
def tiles_at(ring, index, CFG: gl.constexpr):
    """Return slot `index` of a ring: a (1, rows, 1, columns) buffer, as TMA moves it, for each part of the head."""
    if len(ring) == 2:
        tiles = (ring[0].index(index), ring[1].index(index))
    else:
        tiles = (ring[0].index(index),)
    return tiles


@gluon.jit
def q_tiles(shared, W, CFG: gl.constexpr):
    """Return Q of warpgroup W. If results are staged in Q, both parts are in that warpgroup's half of the buffer."""
    if CFG.tiles.stage_in_q:
        RATIO: gl.constexpr = CFG.tiles.parts[0] // CFG.tiles.parts[1]
        tiles = (shared.q[0].index(2 * W), shared.q[1].index((2 * W + 1) * RATIO))
    else:
        tiles = tiles_at(shared.q, W, CFG)
    return tiles


# ------------------------------------------------------------------------------------------------------ producer


@gluon.jit
def load_tile(desc, tiles, full, batch, row, head, OTHERS: gl.constexpr, CFG: gl.constexpr):
    """Load all parts of one tile; `full` counts their bytes and the OTHERS."""
    if len(desc) == 2:
        mbarrier.expect(full, desc[0].block_type.nbytes + desc[1].block_type.nbytes + OTHERS)
    else:
        mbarrier.expect(full, desc[0].block_type.nbytes + OTHERS)
    load_parts(desc, tiles, full, batch, row, head, CFG)


@gluon.jit
def load_parts(desc, tiles, full, batch, row, head, CFG: gl.constexpr):
    """Load all parts of one tile, whose bytes `full` expects."""
    tma_load(desc[0], [batch, row, head, 0], full, tiles[0])
    if len(desc) == 2:
        tma_load(desc[1], [batch, row, head, CFG.tiles.parts[0]], full, tiles[1])


@gluon.jit
def store_number(buffer, number):
    """Store a number in shared memory, by the producer warp."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    buffer.store(gl.full([1], number, gl.int32, layout))


@gluon.jit
def load_number(buffer):
    """Load a number from shared memory, by a consumer."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(buffer.load(layout), 0)


@gluon.jit
def publish(ticket, row, num_blocks, count, shared, barriers, CFG: gl.constexpr):
    """Tell the consumers which tile is next; under a two-sided mask also its first row and its number of blocks."""
    index, phase = slot(count, 2)
    mbarrier.wait(barriers.ticket_empty.index(index), phase ^ 1)
    store_number(shared.ticket.index(index), ticket)
    if CFG.mask == "ends":
        store_number(shared.ticket.index(2 + 2 * index), row)
        store_number(shared.ticket.index(3 + 2 * index), num_blocks)
    mbarrier.arrive(barriers.ticket_full.index(index), count=1)


@gluon.jit
def own_head(head, W: gl.constexpr, CFG: gl.constexpr):
    """Return the head of warpgroup W in a tile whose heads are numbered together."""
    return head * CFG.heads + W % CFG.heads


@gluon.jit
def own_row(row, W: gl.constexpr, CFG: gl.constexpr):
    """Return the first row of warpgroup W in a tile."""
    return row + W // CFG.heads * CFG.tiles.block_m


@gluon.jit
def load_q(q_desc, shared, barriers, tile, count, CFG: gl.constexpr):
    """Load the rows of each warpgroup once it has finished with those of the previous tile."""
    WARPGROUPS: gl.constexpr = CFG.tiles.num_warpgroups
    for w in gl.static_range(WARPGROUPS):
        mbarrier.wait(barriers.q_empty.index(w), (count & 1) ^ 1)
        load_tile(q_desc, q_tiles(shared, w, CFG), barriers.q_full.index(w), tile.batch,
                  own_row(tile.row, w, CFG), own_head(tile.head, w, CFG), 0, CFG)  # fmt: skip


# ----------------------------------------------------------------------------------------------------- consumers


@gluon.jit
def matrices(tiles, CFG: gl.constexpr):
    """View the (1, rows, 1, columns) buffer of each part as the (rows, columns) matrix that wgmma reads."""
    first = tiles[0].reshape([tiles[0].shape[1], tiles[0].shape[3]])
    if len(tiles) == 2:
        parts = (first, tiles[1].reshape([tiles[1].shape[1], tiles[1].shape[3]]))
    else:
        parts = (first,)
    return parts


@gluon.jit
def own_q(shared, W: gl.constexpr, CFG: gl.constexpr):
    """Return Q of warpgroup W as matrices."""
    return matrices(q_tiles(shared, opaque(W), CFG), CFG)


@gluon.jit
def scores(q, k, CFG: gl.constexpr):
    """Issue S = Q K^T."""
    S_LAYOUT: gl.constexpr = CFG.score_layout
    BM: gl.constexpr = CFG.tiles.block_m
    BN: gl.constexpr = CFG.tiles.block_n
    zeros = gl.zeros([BM, BN], gl.float32, S_LAYOUT)
    s = warpgroup_mma(q[0], k[0].permute((1, 0)), zeros, use_acc=False, is_async=True)
    if len(q) == 2:
        s = warpgroup_mma(q[1], k[1].permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def scaled(acc, factor, CFG: gl.constexpr):
    """Return O with every row multiplied by its factor."""
    O_LAYOUT: gl.constexpr = CFG.acc_layouts[0]
    first = acc[0] * gl.convert_layout(factor, gl.SliceLayout(1, O_LAYOUT))[:, None]
    if len(acc) == 2:
        O_LAYOUT1: gl.constexpr = CFG.acc_layouts[1]
        parts = (first, acc[1] * gl.convert_layout(factor, gl.SliceLayout(1, O_LAYOUT1))[:, None])
    else:
        parts = (first,)
    return parts


@gluon.jit
def rescaled_part(acc, factor, PART: gl.constexpr, CFG: gl.constexpr):
    """Return one part of O, rows multiplied by their factors, which are mostly 1."""
    layout: gl.constexpr = CFG.acc_layouts[PART]
    columns: gl.constexpr = CFG.tiles.value_parts[PART]
    factor = gl.convert_layout(factor, gl.SliceLayout(1, layout))[:, None].broadcast_to([CFG.tiles.block_m, columns])
    return scale_unless_one(acc, factor, CFG.tiles.block_m * columns // 128)


@gluon.jit
def rescaled(acc, factor, CFG: gl.constexpr):
    """Return O rescaled by exp(old m - m), which is mostly 1; see `scaled`."""
    if len(acc) == 2:
        parts = (rescaled_part(acc[0], factor, 0, CFG), rescaled_part(acc[1], factor, 1, CFG))
    else:
        parts = (rescaled_part(acc[0], factor, 0, CFG),)
    return parts


@gluon.jit
def zero_acc(CFG: gl.constexpr):
    """Return O of no keys: zeros."""
    O_LAYOUT: gl.constexpr = CFG.acc_layouts[0]
    BM: gl.constexpr = CFG.tiles.block_m
    columns: gl.constexpr = CFG.tiles.value_parts[0]
    first = gl.zeros([BM, columns], gl.float32, O_LAYOUT)
    if len(CFG.tiles.value_parts) == 2:
        O_LAYOUT1: gl.constexpr = CFG.acc_layouts[1]
        columns1: gl.constexpr = CFG.tiles.value_parts[1]
        parts = (first, gl.zeros([BM, columns1], gl.float32, O_LAYOUT1))
    else:
        parts = (first,)
    return parts


@gluon.jit
def hide(s, index, key, rows, shared, pointers, CFG: gl.constexpr):
    """Return S with -inf for keys that the row does not see; their ends are in slot `index` of the ring."""
    S_LAYOUT: gl.constexpr = CFG.score_layout
    keys = key + gl.arange(0, CFG.tiles.block_n, layout=gl.SliceLayout(0, S_LAYOUT))
    if CFG.mask == "ends":  # all is read again in each masked block, since the others need the registers
        own = rows.first + gl.arange(0, CFG.tiles.block_m, layout=gl.SliceLayout(1, S_LAYOUT))
        stop = gl.load(pointers.stop + own)
        if CFG.ends_bytes:
            ends = shared.ends.index(index).reshape([CFG.tiles.block_n]).load(gl.SliceLayout(0, S_LAYOUT))
        else:
            columns = gl.arange(0, CFG.tiles.block_n, layout=gl.SliceLayout(0, S_LAYOUT))
            ends = gl.load(gl.multiple_of(pointers.ends + key, 16) + columns)
        SHAPE: gl.constexpr = s.shape
        own, ends = own[:, None].broadcast_to(SHAPE), ends[None, :].broadcast_to(SHAPE)
        s = seen_only(s, own, ends, keys[None, :].broadcast_to(SHAPE), stop[:, None].broadcast_to(SHAPE))
        if CFG.starts:
            start = gl.load(pointers.start + rows.first + gl.arange(0, CFG.tiles.block_m, layout=stop.type.layout))
            s = gl.where(keys[None, :] >= start[:, None], s, float("-inf"))
    else:
        visible = keys[None, :] < rows.stop[:, None]
        if CFG.mask != "none":
            visible = visible & (keys[None, :] >= rows.start[:, None])
        s = gl.where(visible, s, float("-inf"))
    return s


@gluon.jit
def lane_sums(p, CFG: gl.constexpr):
    """Return row sums within a thread; the four lanes that share a row add theirs once, at the end."""
    return gl.sum(gl.sum(p.reshape([p.shape[0], p.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def over_lanes(x, CFG: gl.constexpr):
    """Return the largest number of each row, of which the four lanes that share a row have one in a first register."""
    BM: gl.constexpr = CFG.tiles.block_m
    EIGHTS: gl.constexpr = CFG.tiles.block_n // 8
    x = x.reshape([BM, EIGHTS, 4, 2]).permute([0, 2, 1, 3]).reshape([BM, 4, 2 * EIGHTS])
    for _ in gl.static_range(EIGHTS.bit_length()):  # the first of a lane's registers
        x = x.reshape([BM, 4, x.shape[2] // 2, 2]).split()[0]
    return gl.convert_layout(gl.max(x.reshape([BM, 4]), 1), gl.SliceLayout(1, CFG.score_layout), assert_trivial=True)


@gluon.jit
def nothing_yet(CFG: gl.constexpr):
    """Return O, row maxima and lanes' sums before the first block."""
    BM: gl.constexpr = CFG.tiles.block_m
    BN: gl.constexpr = CFG.tiles.block_n
    S_LAYOUT: gl.constexpr = CFG.score_layout
    row_max = gl.full([BM], float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
    return zero_acc(CFG), row_max, lane_sums(gl.zeros([BM, BN], gl.float32, S_LAYOUT), CFG)


@gluon.jit
def announce_stretch(index, end, blocks, masked, shared):
    """Tell the consumers which stretch begins in slot `index` of the ring; see `stretch_at`."""
    store_number(shared.ticket.index(6 + 2 * index), end)
    store_number(shared.ticket.index(7 + 2 * index), blocks * 2 + masked)


@gluon.jit
def stretch_at(index, shared):
    """Return the stretch that begins in slot `index`: the key after its last one, its masked and its other blocks."""
    end = load_number(shared.ticket.index(6 + 2 * index))
    number = load_number(shared.ticket.index(7 + 2 * index))
    masked = (number & 1) * (number >> 1)
    return end, masked, (number >> 1) - masked


@gluon.jit
def key_of(tile, i, CFG: gl.constexpr):
    """Return the first key of the i-th block of the walk."""
    return tile.key + (tile.num_blocks - 1 - i) * CFG.tiles.block_n


@gluon.jit
def take_turn(token, W: gl.constexpr, CFG: gl.constexpr):
    """Wait until the previous consumer has passed the turn to consumer W."""
    if CFG.tiles.turns:
        named_barrier(token, 8 + W, 256, False)


@gluon.jit
def pass_turn(token, W: gl.constexpr, CFG: gl.constexpr):
    """Let the next consumer issue its products."""
    if CFG.tiles.turns:
        named_barrier(token, 8 + (W + 1) % CFG.tiles.num_warpgroups, 256, True)


@gluon.jit
def pass_block(kv, shared, barriers, CFG: gl.constexpr):
    """Release a block that none of the warpgroup's rows sees, so that all warpgroups count the ring's uses alike."""
    index, phase = slot(kv, CFG.tiles.num_stages)
    mbarrier.wait(barriers.k_full.index(index), phase)
    mbarrier.arrive(barriers.k_empty.index(index), count=1)
    if not CFG.tiles.halves:
        mbarrier.wait(barriers.v_full.index(index), phase)
        mbarrier.arrive(barriers.v_empty.index(index), count=1)
    return kv + 1


@gluon.jit
def attend_nothing(q_empty, kv, CFG: gl.constexpr):
    """Return the results of `attend_overlapped` for a tile that sees no key."""
    if not CFG.tiles.stage_in_q:
        mbarrier.arrive(q_empty, count=1)
    BM: gl.constexpr = CFG.tiles.block_m
    rows: gl.constexpr = gl.SliceLayout(1, CFG.score_layout)
    inverse = gl.full([BM], 0.0, gl.float32, rows)
    return zero_acc(CFG), inverse, gl.full([BM], float("-inf"), gl.float32, rows), kv


@gluon.jit
def merge_weights(lse, old_lse):
    """Return lse of both, and the outputs' factors exp(lse - both), exp(old_lse - both); two empties give an empty."""
    LOG2E: gl.constexpr = 1.4426950408889634
    top = gl.maximum(lse, old_lse)
    top = gl.where(top == float("-inf"), 0.0, top)
    weight = gl.exp2((lse - top) * LOG2E)
    old_weight = gl.exp2((old_lse - top) * LOG2E)
    total = weight + old_weight
    inverse = gl.where(total == 0, 0.0, 1.0 / total)
    return gl.where(total == 0, float("-inf"), top + gl.log(total)), weight * inverse, old_weight * inverse


@gluon.jit
def stage_of(shared, desc, W: gl.constexpr):
    """Return the staging buffer of a warpgroup's results as a tile of this descriptor."""
    return start_of(shared.stage.index(W), desc)


@gluon.jit
def load_state(acc_desc, shared, full, tile, row, W: gl.constexpr, PART: gl.constexpr, CFG: gl.constexpr):
    """Load part of the earlier output into the staging buffer, once the previous store from there has been read."""
    column: gl.constexpr = PART * CFG.tiles.value_parts[0]
    buffer = stage_of(shared, acc_desc[PART], W)
    tma_store_wait(0)
    mbarrier.expect(full, acc_desc[PART].block_type.nbytes)
    tma_load(acc_desc[PART], [tile.batch, row, tile.head, column], full, buffer)


@gluon.jit
def store_part(
    acc, o_desc, acc_desc, shared, barriers, tile, row, loads, old_weight,
    W: gl.constexpr, PART: gl.constexpr, CFG: gl.constexpr,
):  # fmt: skip
    """Merge part of the earlier output into this one and store it. Returns the number of state loads so far."""
    BM: gl.constexpr = CFG.tiles.block_m
    column: gl.constexpr = PART * CFG.tiles.value_parts[0]
    layout: gl.constexpr = CFG.acc_layouts[PART]
    columns: gl.constexpr = CFG.tiles.value_parts[PART]
    if CFG.resume:
        if PART == 1 or CFG.tiles.stage_in_q:
            load_state(acc_desc, shared, barriers.acc_full.index(W), tile, row, W, PART, CFG)
        mbarrier.wait(barriers.acc_full.index(W), loads & 1)
        loads += 1
        old = stage_of(shared, acc_desc[PART], W).reshape([BM, columns]).load(layout)
        old_weight = gl.convert_layout(old_weight, gl.SliceLayout(1, layout))[:, None]
        # Written out: of the two products in this sum the compiler might fuse another one for each output dtype.
        acc = gl.fma(old, old_weight.broadcast_to(old.shape), acc)
    elif PART == 1 or not CFG.tiles.stage_in_q:
        tma_store_wait(0)
    buffer = stage_of(shared, o_desc[PART], W)
    buffer.reshape([BM, columns]).store(acc.to(o_desc[PART].dtype))
    fence_async_shared()
    tma_store(o_desc[PART], [tile.batch, row, tile.head, column], buffer)
    return loads


@gluon.jit
def receive(count, shared, barriers, CFG: gl.constexpr):
    """Return the next ticket from the producer; under a two-sided mask also the tile's row and number of blocks."""
    index, phase = slot(count, 2)
    mbarrier.wait(barriers.ticket_full.index(index), phase)
    ticket = load_number(shared.ticket.index(index))
    if CFG.mask == "ends":
        row = load_number(shared.ticket.index(2 + 2 * index))
        num_blocks = load_number(shared.ticket.index(3 + 2 * index))
    else:
        row = 0
        num_blocks = 0
    mbarrier.arrive(barriers.ticket_empty.index(index), count=1)
    return ticket, row, num_blocks


@gluon.jit
def received_tile(ticket, row, num_blocks, problem, pointers, W: gl.constexpr, CFG: gl.constexpr):
    """Return the tile of a ticket as consumer W sees it, with its own head."""
    if CFG.mask == "ends":
        batch, head, _rank = place_of(ticket, problem)
        return Tile(batch, own_head(head, W, CFG), row, 0, num_blocks, 0, 0, num_blocks, num_blocks, 0, 0)
    tile = decode(ticket, problem, pointers, W * CFG.tiles.block_m, CFG.tiles.block_m, CFG)
    return Tile(tile.batch, own_head(tile.head, W, CFG), tile.row, tile.key, tile.num_blocks, tile.first_seen,
                tile.first_full, tile.end_full, tile.end_seen)  # fmt: skip


# -------------------------------------------------------------------------------------------------------- kernel


@gluon.jit
def pair(first, second, CFG: gl.constexpr):
    """Return the descriptors of both parts of the head; parts of equal width share one."""
    if len(CFG.tiles.parts) == 1:
        parts = (first,)
    elif CFG.tiles.parts[0] == CFG.tiles.parts[1]:
        parts = (first, first)
    else:
        parts = (first, second)
    return parts


@gluon.jit
def ring_of(desc, COUNT: gl.constexpr, CFG: gl.constexpr):
    """Allocate COUNT tiles of shared memory for each part of the head."""
    first = gl.allocate_shared_memory(desc[0].dtype, [COUNT] + desc[0].block_shape, desc[0].layout)
    if len(desc) == 2:
        ring = (first, gl.allocate_shared_memory(desc[1].dtype, [COUNT] + desc[1].block_shape, desc[1].layout))
    else:
        ring = (first,)
    return ring


@gluon.jit
def tickets(CFG: gl.constexpr):
    """Allocate two tickets; under a two-sided mask also row and number of blocks of each, and two numbers a stage."""
    COUNT: gl.constexpr = 6 + 2 * CFG.tiles.num_stages if CFG.mask == "ends" else 2
    return gl.allocate_shared_memory(gl.int32, [COUNT, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def barrier_ring(SIZE: gl.constexpr, ARRIVALS: gl.constexpr):
    """Allocate SIZE mbarriers, each complete after ARRIVALS arrivals."""
    ring = gl.allocate_shared_memory(gl.int64, [SIZE, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SIZE):
        mbarrier.init(ring.index(i), count=ARRIVALS)
    return ring


@gluon.jit
def make_barriers(CFG: gl.constexpr):
    """Allocate and initialise the mbarriers of a program."""
    WARPGROUPS: gl.constexpr = CFG.tiles.num_warpgroups
    STAGES: gl.constexpr = CFG.tiles.num_stages
    q_full = barrier_ring(WARPGROUPS, 1)
    if CFG.resume:
        acc_full = barrier_ring(WARPGROUPS, 1)
    else:
        acc_full = q_full  # not a new, unused one: its memory would be reused, see backward_keys
    k_full = barrier_ring(STAGES, 1)
    k_empty = barrier_ring(STAGES, WARPGROUPS)
    if CFG.tiles.halves or CFG.tiles.joint:
        v_full = k_full
        v_empty = k_empty
    else:
        v_full = barrier_ring(STAGES, 1)
        v_empty = barrier_ring(STAGES, WARPGROUPS)
    barriers = Barriers(
        q_full, barrier_ring(WARPGROUPS, 1), k_full, k_empty, v_full, v_empty, acc_full,
        barrier_ring(2, 1), barrier_ring(2, WARPGROUPS),
    )  # fmt: skip
    fence_async_shared()
    return barriers
