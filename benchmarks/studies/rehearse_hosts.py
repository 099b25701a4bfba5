"""Rehearsal of two hosts on two GPUs: a rail of `by_host` over sockets, against the time that `ringflash plan` expects.

    torchrun --nproc-per-node 2 benchmarks/studies/rehearse_hosts.py [--json results.json]
    torchrun --nproc-per-node 2 benchmarks/studies/rehearse_hosts.py --toy            (CPU, gloo)

Each GPU stands for one of the eight of a host, after the exchange of heads: it has the rows of the host and an eighth
of the heads, and one GPU to talk to. NCCL may use sockets only, whose GB/s are measured first. They are slower than a
NIC, so sequences are longer by the same factor: bytes grow with the tokens and work with their square, so the share of
the messages is that of the hosts. Without messages the same call gives the time of the kernels. The model knows no more
of the machine than how long all messages and all kernels take alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "kernels"), str(ROOT)]
os.environ |= {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket"}  # read when torch loads NCCL
os.environ |= {"NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "4"}  # three times as fast, so the run is shorter

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh  # noqa: E402

import ringflash  # noqa: E402
from benchmarks.bench_ring import join, timed  # noqa: E402
from benchmarks.environment import describe  # noqa: E402
from benchmarks.ring_contenders import Row, Setting  # noqa: E402
from ringflash.attention.sections import choose_blocks, choose_sections  # noqa: E402
from ringflash.comm import call_numbers  # noqa: E402
from ringflash.comm.transport import Message, Pending, PointToPoint, message_transport, open_transport  # noqa: E402
from ringflash.commands.plan.ring import pipeline_seconds  # noqa: E402
from ringflash_kernels.api import state_dtype  # noqa: E402

GPUS_PER_HOST, NIC_GBYTES = 8, 50
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 1, 128  # an eighth of 32/8 heads
MOST_ROUNDS, ENOUGH_MS = 5, 3000


def main() -> None:
    """Measure the link, then each length with and without its messages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="2048,4096,8192", help="tokens of a GPU that are rehearsed")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--toy", action="store_true", help="few tokens on the CPU: shows that it runs, and no speed")
    options = parser.parse_args()
    device = join(options.toy)
    assert dist.group.WORLD is not None and dist.get_world_size() == 2
    row = Row(0, NUM_HEADS, NUM_KV_HEADS, 16 if options.toy else HEAD_DIM, "causal")
    setting = Setting(row, dist.group.WORLD, device, torch.float32 if options.toy else torch.bfloat16)
    link = link_gbytes(setting, 1 << 20 if options.toy else 1 << 28)
    results = []
    for tokens in map(int, options.tokens.split(",")):
        rows = 64 if options.toy else round(GPUS_PER_HOST * tokens * NIC_GBYTES / link / 1024) * 1024
        result = rehearse(setting._replace(row=replace(row, tokens_per_rank=rows)), link)
        results.append({"tokens": tokens, **result})
        if dist.get_rank() == 0:
            print(line(results[-1]), flush=True)
            if options.json:
                head = {"environment": describe(), "link_gbytes": link, "nic_gbytes": NIC_GBYTES}
                options.json.write_text(json.dumps({**head, "results": results}, indent=1) + "\n")
    dist.destroy_process_group()


def link_gbytes(setting: Setting, num_bytes: int) -> float:
    """Return GB/s each way of a message in both directions, the median of five."""
    channel = open_transport(message_transport(setting.device), setting.group)
    assert isinstance(channel, PointToPoint)
    out, into = (torch.zeros(num_bytes, dtype=torch.uint8, device=setting.device) for _ in range(2))
    peer = 1 - channel.rank

    def exchange() -> None:
        channel.post([Message(out, peer, "bytes")], [Message(into, peer, "bytes")]).wait()

    exchange()
    gbytes = num_bytes / 1e6 / statistics.median(timed(exchange, setting)[0] for _ in range(5))
    shared = torch.tensor([gbytes], dtype=torch.float64, device=setting.device)
    dist.broadcast(shared, 0)
    return shared.item()


def rehearse(setting: Setting, link: float) -> dict[str, Any]:
    """Return the milliseconds of both passes with and without messages, and those that the model expects."""
    mesh = DeviceMesh(setting.device.type, [[0], [1]], mesh_dim_names=("host", "gpu"))
    q, k, v = setting.inputs()

    def attention() -> torch.Tensor:
        out = ringflash.ring_attention(q, k, v, group=mesh, transport="by_host")
        assert isinstance(out, torch.Tensor)
        return out

    def passes() -> tuple[float, float]:
        out = attention()  # also the first call, which allocates
        with torch.no_grad():
            forward, _ = timed(attention, setting)
        backward, _ = timed(lambda: torch.autograd.grad(out, (q, k, v), out.detach()), setting)
        return forward, backward

    silent = mock.patch.object(PointToPoint, "post", lambda *_: Pending([]))
    unread = mock.patch.object(call_numbers, "expect", lambda *_: None)  # no number arrives either
    ways: dict[str, list[tuple[float, float]]] = {"messages": [], "kernels": []}
    passes()
    for _ in range(MOST_ROUNDS):
        ways["messages"].append(passes())
        with silent, unread:
            ways["kernels"].append(passes())
        if sum(map(sum, ways["messages"])) > ENOUGH_MS:
            break
    medians = {way: [statistics.median(column) for column in zip(*times, strict=True)] for way, times in ways.items()}
    ms = medians | {"model": model_ms(setting, link, medians["kernels"])}
    return {"rows": setting.row.tokens_per_rank, "ms": ms, "percent": percent(ms)}


def percent(ms: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Return the speed with messages, measured and by the model, in percent of that of the kernels, by pass."""
    passes = {"forward": slice(0, 1), "backward": slice(1, 2), "both": slice(0, 2)}
    return {
        name: {
            how: 100 * sum(ms["kernels"][part]) / sum(ms[way][part])
            for how, way in (("measured", "messages"), ("model", "model"))
        }
        for name, part in passes.items()
    }


def model_ms(setting: Setting, link: float, kernels: list[float]) -> list[float]:
    """Return the milliseconds of forward and backward by `ringflash plan`, for these kernels and this link."""
    row, size = setting.row, 2
    rows, seqlen = row.tokens_per_rank, size * row.tokens_per_rank
    shape, pairs = (1, rows, row.num_kv_heads, row.head_dim), seqlen * (seqlen + 1) // 2 // size
    blocks = choose_blocks(shape, row.num_heads, seqlen, seqlen - rows, pairs, size, setting.dtype, "nccl")
    heads = choose_sections(shape, row.num_heads, seqlen, setting.dtype, len(blocks))
    elements = 2 * rows * row.num_kv_heads * row.head_dim
    arrive, leave = (elements * dtype.itemsize / link / 1e6 for dtype in (setting.dtype, state_dtype(setting.dtype)))
    return [
        pipeline_seconds(heads.forward, blocks, arrive, 0.0, kernels[0]),
        pipeline_seconds(heads.backward, blocks, arrive, leave, kernels[1]),
    ]


def line(result: dict[str, Any]) -> str:
    """Return the text of a result: percent of the time of the kernels."""
    kernels = " / ".join(f"{ms:.1f}" for ms in result["ms"]["kernels"])
    shares = (f"{name} {both['measured']:.1f} ({both['model']:.1f})" for name, both in result["percent"].items())
    return (
        f"{result['tokens']} tokens a GPU ({result['rows']} here): kernels {kernels} ms; percent of their speed, "
        f"measured (model): {', '.join(shares)}"
    )


if __name__ == "__main__":
    main()
