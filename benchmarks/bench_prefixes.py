"""Rollouts that share a prompt, over several GPUs: tokens and seconds with the prompt once, and with one for each.

    python benchmarks/bench_prefixes.py --json FILE [--gpus 2] [--prompt 32768 --answers 16 --length 4096] [--limit 90]
    python benchmarks/bench_prefixes.py --json FILE --toy            (CPU, gloo: no speed)

attention: forward and backward of ring_attention, 32/8 heads of 128, layout balanced. layer: a decoder layer of the
sizes of Llama 3 8B around it, without rotary embedding, its MLP recomputed by pieces. log_probs: `ringflash.log_probs`
of two such layers with an embedding and a head of 128,256 tokens, with and without share_prefixes, from the tokens of
all rollouts to the gradients of the weights. flex_attention: torch's context parallelism with its load balancer, which
gathers keys and values, on the sequence with one prompt. Each time is that of the slowest rank, the median of the
repetitions, which follow an untimed one. The contenders of a group take turns. Each group runs in processes of its own,
at most --limit seconds; the file is written after each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "kernels"), str(ROOT)]

import ringflash  # noqa: E402
from benchmarks.bench_ring import join  # noqa: E402
from benchmarks.environment import describe, result_text  # noqa: E402
from ringflash.loss import token_log_probs  # noqa: E402
from ringflash.sequence.layout import read_documents  # noqa: E402
from ringflash.sequence.mask import SequenceMask  # noqa: E402

LAYOUT, PIECE = "balanced", 16384
Run = Callable[[], object]


class Sizes:
    """Sizes of the layer: Llama 3 8B's, or a toy's."""

    def __init__(self, toy: bool) -> None:
        self.heads, self.kv_heads, self.head_dim, self.mlp = (4, 2, 16, 96) if toy else (32, 8, 128, 14336)
        self.vocab = 50 if toy else 128_256
        self.hidden = self.heads * self.head_dim


class Rollouts:
    """Documents of one packing, and how many pairs they show.

    Args:
        shared: the prompt is one document that all answers continue. Otherwise each answer has its own copy of it.
    """

    def __init__(self, prompt: int, answers: int, length: int, shared: bool) -> None:
        self.count, self.shared = (prompt, answers, length), shared
        lengths = [prompt, *[length] * answers] if shared else [prompt + length] * answers
        bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).int()
        self.seqlen = int(bounds[-1])
        self.documents = bounds
        if shared:
            self.documents = ringflash.document_table(bounds, torch.tensor([-1, *[0] * answers]))
        self.mask = SequenceMask(self.seqlen, True, (-1, -1), *read_documents(self.documents))


class Layer(nn.Module):
    """Decoder layer around ring_attention."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes, width = sizes, sizes.hidden
        columns = (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, columns, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 2 * sizes.mlp, bias=False), nn.Linear(sizes.mlp, width, bias=False)

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        """Return the layer's output for a shard x, (1, tokens, hidden)."""
        s = self.sizes
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (-1, s.head_dim))
        q, k, v = heads.split((s.heads, s.kv_heads, s.kv_heads), 2)
        x = x + self.out(attend(q, k, v, documents).flatten(2))
        return torch.cat([checkpoint(self._mlp, part, use_reentrant=False) for part in x.split(PIECE, 1)], 1)

    def _mlp(self, x: Tensor) -> Tensor:
        gate, up = self.up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(nn.functional.silu(gate) * up)


class Decoder(nn.Module):
    """Two layers, an embedding and a head, called as `ringflash.log_probs` calls a model."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embedding, self.layers = (
            nn.Embedding(sizes.vocab, sizes.hidden),
            nn.ModuleList(Layer(sizes) for _ in range(2)),
        )
        self.head = nn.Linear(sizes.hidden, sizes.vocab, bias=False)

    def forward(
        self, *, input_ids: Tensor, shift_labels: Tensor, cu_seqlens: Tensor, temperature: float, **_: object
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities of the labels of a shard, and entropies."""
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x, cu_seqlens)
        return token_log_probs(x, self.head.weight, shift_labels, logit_scale=1 / temperature)


def attend(q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
    """Return attention over the ring."""
    out = ringflash.ring_attention(q, k, v, group=dist.group.WORLD, cu_seqlens=documents, layout=LAYOUT)
    assert isinstance(out, Tensor)
    return out


def draw(tokens: int, *shape: int, device: torch.device) -> Tensor:
    """Return a random leaf of (1, tokens, ...)."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    return torch.randn(1, tokens, *shape, device=device, dtype=dtype, requires_grad=True)


def attention_run(rollouts: Rollouts, sizes: Sizes, device: torch.device) -> Run:
    """Return forward and backward of attention."""
    tokens = rollouts.seqlen // dist.get_world_size()
    q, k, v = (draw(tokens, n, sizes.head_dim, device=device) for n in (sizes.heads, sizes.kv_heads, sizes.kv_heads))

    def run() -> None:
        out = attend(q, k, v, rollouts.documents)
        torch.autograd.grad(out, (q, k, v), out.detach())

    return run


def layer_run(rollouts: Rollouts, sizes: Sizes, device: torch.device) -> Run:
    """Return forward and backward of a layer."""
    x = draw(rollouts.seqlen // dist.get_world_size(), sizes.hidden, device=device)
    layer = Layer(sizes).to(device, x.dtype)

    def run() -> None:
        out = layer(x, rollouts.documents)
        torch.autograd.grad(out, (x, *layer.parameters()), out.detach())

    return run


def log_probs_run(rollouts: Rollouts, sizes: Sizes, device: torch.device) -> Run:
    """Return `ringflash.log_probs` of all rollouts and its gradients, with share_prefixes if there is one prompt."""
    prompt, answers, length = rollouts.count
    tokens = torch.randint(sizes.vocab, (answers, prompt + length), generator=torch.Generator().manual_seed(0))
    tokens[:, :prompt] = tokens[0, :prompt]
    tokens = tokens.view(1, -1).to(device)
    bounds = torch.arange(answers + 1, dtype=torch.int32) * (prompt + length)
    model = Decoder(sizes).to(device, draw(1, device=device).dtype)

    def run() -> None:
        found = ringflash.log_probs(
            model, tokens, group=dist.group.WORLD, cu_seqlens=bounds, layout=LAYOUT, share_prefixes=rollouts.shared
        )
        assert isinstance(found, Tensor)
        torch.autograd.grad(found.sum(), tuple(model.parameters()))

    return run


def flex_run(rollouts: Rollouts, sizes: Sizes, device: torch.device) -> Run:
    """Return forward and backward of flex_attention under torch's context parallelism."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import _attention as cp
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    bounds = list(rollouts.mask.documents.rows[0])  # type: ignore[union-attr]
    start = torch.arange(len(bounds) - 1).repeat_interleave(torch.tensor(bounds).diff()).to(device)
    prompt = bounds[1]

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & ((start[i] == start[j]) | (j < prompt))

    n = rollouts.seqlen
    blocks = torch.compile(create_block_mask)(visible, 1, 1, n, n, device=device)
    balancer = cp._PTRRLoadBalancer(blocks, dist.get_world_size())
    tokens = n // dist.get_world_size()
    q, k, v = (
        draw(tokens, n, sizes.head_dim, device=device).detach().transpose(1, 2).contiguous().requires_grad_()
        for n in (sizes.heads, sizes.kv_heads, sizes.kv_heads)
    )
    (local,) = cp._context_parallel_shard(mesh, [blocks], [2], balancer)

    class Flex(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return compiled(q, k, v, block_mask=local, enable_gqa=True)

    compiled = torch.compile(flex_attention)
    module = Flex()
    kind = cp._ContextParallel.AttentionType.FLEX
    cp._ContextParallel(seq_dim=2, attention_type=kind)._apply(module, mesh)

    def run() -> None:
        out = module(q, k, v)
        torch.autograd.grad(out, (q, k, v), out.detach())

    return run


def seconds(run: Run, device: torch.device) -> float:
    """Return the seconds of the slowest rank, from an idle device on."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    begin = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    spent = torch.tensor([time.perf_counter() - begin], device=device)
    dist.all_reduce(spent, op=dist.ReduceOp.MAX)
    return float(spent)


def timed_in_turns(
    makers: dict[str, tuple[Callable[[Rollouts, Sizes, torch.device], Run], Rollouts]],
    sizes: Sizes,
    device: torch.device,
    repetitions: int,
    left_out: dict[str, str],
) -> dict[str, float]:
    """Return the median seconds of contenders that take turns; the error of one that fails goes to `left_out`."""
    runs: dict[str, Run] = {}
    for name, (make, rollouts) in makers.items():
        problem = ""
        try:
            runs[name] = make(rollouts, sizes, device)
            runs[name]()
        except Exception as error:  # torch's private names change; both ranks raise alike
            problem = f"{type(error).__name__}: {str(error)[:300]}"
            runs.pop(name, None)
        if problem:
            left_out[name] = problem
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repetitions):
        for name, run in runs.items():
            run()
            samples[name].append(seconds(run, device))
    return {name: round(statistics.median(values), 5) for name, values in samples.items()}


Makers = dict[str, tuple[Callable[[Rollouts, Sizes, torch.device], Run], bool]]  # and whether there is one prompt
GROUPS: dict[str, Makers] = {
    "flex_attention": {
        "flex_attention, shared": (flex_run, True),
        "attention beside it, shared": (attention_run, True),
    },
    "attention": {"attention, shared": (attention_run, True), "attention, unshared": (attention_run, False)},
    "layer": {"layer, shared": (layer_run, True), "layer, unshared": (layer_run, False)},
    "log_probs": {"log_probs, shared": (log_probs_run, True), "log_probs, unshared": (log_probs_run, False)},
}


def run_group(options: argparse.Namespace) -> None:
    """Time a group, as one of its processes."""
    device, sizes = join(options.toy), Sizes(options.toy)
    count = (options.prompt, options.answers, options.length)
    once, each = (Rollouts(*count, shared=shared) for shared in (True, False))
    makers = {name: (make, once if shared else each) for name, (make, shared) in GROUPS[options.group].items()}
    left_out: dict[str, str] = {}
    found = timed_in_turns(makers, sizes, device, options.repetitions, left_out)
    if dist.get_rank() == 0:
        content = {
            "ranks": dist.get_world_size(), "rollouts": count, "toy": options.toy,
            "tokens": {"shared": once.seqlen, "unshared": each.seqlen},
            "pairs": {"shared": once.mask.num_visible, "unshared": each.mask.num_visible},
            "seconds": found, "left_out": left_out,
        }  # fmt: skip
        options.json.write_text(json.dumps(content))
    dist.barrier()
    dist.destroy_process_group()


def content_of(group: str, options: argparse.Namespace) -> dict:
    """Run a group; return what it wrote, or who is left out because the processes failed or were not done in time."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "group.json"
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.gpus),
            __file__, "--group", group, "--json", str(path), *(["--toy"] if options.toy else []),
        ]  # fmt: skip
        for name in ("prompt", "answers", "length", "repetitions"):
            command += [f"--{name}", str(getattr(options, name))]
        process = subprocess.Popen(command)
        try:
            problem = f"ended with {code}" if (code := process.wait(options.limit)) else ""
        except subprocess.TimeoutExpired:
            problem = f"not finished after {options.limit:.0f} s"
            process.terminate()  # torchrun then ends its processes
            process.wait()
        if path.exists():
            return json.loads(path.read_text())
        return {"seconds": {}, "left_out": dict.fromkeys(GROUPS[group], problem)}


def main() -> None:
    """Run the groups, and write their results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("gpus", 2), ("prompt", 32768), ("answers", 16), ("length", 4096), ("repetitions", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--limit", type=float, default=90, help="seconds of a group")
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--group", choices=GROUPS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.group:
        return run_group(options)
    found: dict = {"environment": describe(), "seconds": {}, "left_out": {}}
    for group in options.groups:
        content = content_of(group, options)
        found = found | content | {name: found[name] | content[name] for name in ("seconds", "left_out")}
        print(json.dumps({name: found[name] for name in ("seconds", "left_out")}), flush=True)
        options.json.write_text(result_text(found))


if __name__ == "__main__":
    main()
