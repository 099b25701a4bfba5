"""Ring attention in plain torch: what ringflash computes, without what makes it fast.

    torchrun --nproc-per-node 4 examples/minimal_ring.py

Each of n ranks holds two chunks of the sequence (its *shard*) and attends to all of it. On step t, rank r computes with
the keys of rank r - t, then passes them to the next rank. Nothing is imported from ringflash. The last lines compare
outputs and gradients with attention on one process, in fp64.

ringflash differs in what a GPU needs: K/V of a few heads are gathered while a fused kernel computes the previous ones,
chunks that a rank cannot see are neither sent nor computed, and the ranks agree on a call before it sends anything
(ringflash/attention).
"""

import torch
import torch.distributed as dist


def local_positions(seqlen: int, size: int, rank: int) -> torch.Tensor:
    """Return the positions of a rank's tokens, (seqlen / size,): chunks r and 2n - 1 - r, an early and a late one.

    Under a causal mask, late tokens see more keys. Pairs of chunks give every rank the same work ("zigzag").
    """
    chunks = torch.arange(seqlen).chunk(2 * size)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])


def rotate(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Send tensors to the next rank of the ring, and return those of the previous one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    received = [torch.empty_like(x) for x in tensors]
    sends = [dist.P2POp(dist.isend, x.contiguous(), (rank + 1) % size) for x in tensors]
    receives = [dist.P2POp(dist.irecv, x, (rank - 1) % size) for x in received]
    for work in dist.batch_isend_irecv(sends + receives):
        work.wait()
    return received


def scores(q: torch.Tensor, k: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Return q k^T / sqrt(head_dim), with -inf where a key is later than the query: (heads, rows, columns)."""
    hidden = columns[None, :] > rows[:, None]
    return (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf)


def positions_at(step: int, seqlen: int) -> torch.Tensor:
    """Return the positions of the keys that this rank holds on a step: those of rank r - step."""
    size = dist.get_world_size()
    return local_positions(seqlen, size, (dist.get_rank() - step) % size)


class RingAttention(torch.autograd.Function):
    """Causal attention of this rank's queries over all keys; q, k, v: (heads, seqlen / size, head_dim)."""

    @staticmethod
    def forward(ctx, q, k, v):
        size = dist.get_world_size()
        rows = positions_at(0, q.shape[1] * size)
        out = torch.zeros_like(q)
        lse = torch.full(q.shape[:2], -torch.inf, dtype=q.dtype)  # log of the sum of exp(scores) so far
        keys, values = k, v
        for step in range(size):
            s = scores(q, keys, rows, positions_at(step, len(rows) * size))
            lse_step = s.logsumexp(-1)
            merged = torch.logaddexp(lse, lse_step)
            # Each partial softmax was divided by its own sum; weigh the two by their shares of the sum of both.
            p = (s - merged[..., None]).exp()
            out = out * (lse - merged).exp()[..., None] + p @ values
            lse = merged
            if step < size - 1:
                keys, values = rotate([keys, values])
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        size, scale = dist.get_world_size(), q.shape[-1] ** -0.5
        rows = positions_at(0, q.shape[1] * size)
        delta = (dout * out).sum(-1, keepdim=True)
        dq, keys, values = torch.zeros_like(q), k, v
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)  # of the keys that are here; they travel with them
        for step in range(size):
            s = scores(q, keys, rows, positions_at(step, len(rows) * size))
            p = (s - lse[..., None]).exp()
            ds = p * (dout @ values.mT - delta) * scale
            dq, dk, dv = dq + ds @ keys, dk + ds.mT @ q, dv + p.mT @ dout
            keys, values, dk, dv = rotate([keys, values, dk, dv])  # after the last step, gradients are back home
        return dq, dk, dv


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # every rank draws the whole sequence, and keeps its shard
    heads, seqlen, head_dim = 4, 256, 32
    whole = [torch.randn(heads, seqlen, head_dim, dtype=torch.float64) for _ in range(4)]
    positions = positions_at(0, seqlen)
    q, k, v, dout = (x[:, positions].contiguous() for x in whole)
    shard = [x.requires_grad_() for x in (q, k, v)]
    out = RingAttention.apply(*shard)
    grads = torch.autograd.grad(out, shard, dout)

    dense_inputs = [x.requires_grad_() for x in whole[:3]]
    dense = torch.nn.functional.scaled_dot_product_attention(*dense_inputs, is_causal=True)
    dense_grads = torch.autograd.grad(dense, dense_inputs, whole[3])
    for name, x, expected in zip(("out", "dq", "dk", "dv"), (out, *grads), (dense, *dense_grads), strict=True):
        error = (x - expected[:, positions]).abs().max().item()
        assert error < 1e-12, f"{name} must equal dense attention's, got a difference of {error:.1e}."
        print(f"rank {dist.get_rank()}: {name} differs from dense attention by at most {error:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
