"""Loss curves of a small model on real text with bf16 attention and with FP8 attention: several seeds, one device.

    python -m benchmarks.fp8_training [--steps 3000] [--seconds 150] [--seeds 0,1,2] [--json results.json]

Trains a decoder with and without normalized queries and keys, once for each choice of attention and each seed. Runs of
a seed start with the same parameters and read the same batches, so that curves differ only by the attention. "bf16
again" repeats the first choice: kernels add dQ in any order, and its difference is the noise that the others are
compared with. On a GPU each run is a CUDA graph on a stream of its own; if `--steps` would take more than `--seconds`,
all runs take fewer. On CPUs the choices are the reference implementations.

The JSON also holds `benchmarks/fp8_layers.py`'s errors of the gradients of each layer, at the first seed's start and
end.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from collections.abc import Callable, Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.studies import fp8_layers
from benchmarks.environment import describe
from benchmarks.studies.fp8_layers import Choice
from recipes.lightning.text import SEPARATOR, VOCAB_SIZE, is_held_out, text_files

CUDA = torch.cuda.is_available()
BF16, FP8 = ("hopper", "hopper_fp8") if CUDA else ("reference", "reference_fp8")
CHOICES = {
    "bf16": BF16,
    "bf16 again": BF16,
    "FP8, backward bf16": FP8,
    "FP8, backward fp8_scores": f"{FP8}_scores",
    "FP8, backward fp8": f"{FP8}_all",
}
VARIANTS = {"with QK-norm": True, "without QK-norm": False}
NUM_POINTS = 60  # of a curve in the results
LAST_STEPS = 0.1  # share of the steps whose mean is the final loss
HELD_OUT_SEQUENCES = 64
HEAD_DIM = 128
NUM_EAGER_STEPS, NUM_TIMED_STEPS = (3, 50) if CUDA else (1, 1)


class Shape(NamedTuple):
    """Sizes of the model and of a batch. There are twice as many query heads as KV heads."""

    layers: int = 4
    width: int = 512
    seqlen: int = 2048
    batch: int = 2


class Layer(nn.Module):
    """A decoder layer: RMSNorm, attention with rotary positions, RMSNorm, SwiGLU."""

    def __init__(self, shape: Shape, qk_norm: bool) -> None:
        super().__init__()
        self.num_heads = shape.width // HEAD_DIM
        self.num_kv_heads, self.qk_norm = self.num_heads // 2, qk_norm
        self.qkv = nn.Linear(shape.width, (self.num_heads + 2 * self.num_kv_heads) * HEAD_DIM, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.up = nn.Linear(shape.width, 6 * shape.width, bias=False)
        self.down = nn.Linear(3 * shape.width, shape.width, bias=False)
        self.norms = nn.ParameterList(nn.Parameter(torch.ones(size)) for size in (shape.width, shape.width))
        self.head_norms = nn.ParameterList(nn.Parameter(torch.ones(HEAD_DIM)) for _ in range(2 * qk_norm))

    def forward(self, x: Tensor, rotary: Tensor, choice: Choice) -> Tensor:
        """Return x after the layer: (batch, seqlen, width)."""
        qkv = self.qkv(rms_norm(x, self.norms[0])).unflatten(-1, (-1, HEAD_DIM))
        q, k, v = qkv.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), 2)
        if self.qk_norm:
            q, k = (rms_norm(y, norm) for y, norm in zip((q, k), self.head_norms, strict=True))
        out: Tensor = fp8_layers.Attention.apply(rotated(q, rotary), rotated(k, rotary), v, choice)
        x = x + self.out(out.flatten(2))
        gate, value = self.up(rms_norm(x, self.norms[1])).chunk(2, -1)
        return x + self.down(F.silu(gate) * value)


class Model(nn.Module):
    """A causal language model of bytes.

    Args:
        choice: attention of all layers; may be changed between calls.
    """

    def __init__(self, shape: Shape, qk_norm: bool, choice: Choice) -> None:
        super().__init__()
        self.choice = choice
        self.layers = nn.ModuleList(Layer(shape, qk_norm) for _ in range(shape.layers))
        self.embedding = nn.Linear(VOCAB_SIZE, shape.width, bias=False)
        self.norm = nn.Parameter(torch.ones(shape.width))
        self.head = nn.Linear(shape.width, VOCAB_SIZE, bias=False)
        angles = torch.arange(shape.seqlen)[:, None] * 1e4 ** -torch.linspace(0, 1, HEAD_DIM // 2 + 1)[:-1]
        self.register_buffer("rotary", torch.stack([angles.cos(), angles.sin()])[:, :, None])

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean loss of the tokens after the first.

        Args:
            tokens: (batch, seqlen + 1), int64.
        """
        inputs = tokens[:, :-1, None] == torch.arange(VOCAB_SIZE, device=tokens.device)  # no indexing: no sort
        x = self.embedding(inputs.to(self.head.weight.dtype))
        for layer in self.layers:
            x = layer(x, self.rotary, self.choice)
        logits = self.head(rms_norm(x, self.norm))
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Return x with its last dimension normalized."""
    return F.rms_norm(x, x.shape[-1:], weight, 1e-6)


def rotated(x: Tensor, rotary: Tensor) -> Tensor:
    """Return x: (batch, seqlen, heads, head_dim) with rotary positions, as x."""
    (cos, sin), (a, b) = rotary, x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def new_model(shape: Shape, qk_norm: bool, choice: Choice, seed: int, device: torch.device) -> Model:
    """Build a model in bf16 whose parameters depend only on the seed."""
    generator = torch.Generator().manual_seed(seed)
    model = Model(shape, qk_norm, choice)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            depth = math.sqrt(2 * shape.layers) if name.endswith(("out.weight", "down.weight")) else 1.0
            nn.init.normal_(parameter, std=0.02 / depth, generator=generator)
    rotary = model.rotary
    model = model.to(device, torch.bfloat16)
    model.rotary = rotary.to(device)
    return model


class Run:
    """One training run: AdamW on fp32 parameters, a copy in bf16, clipping, warm-up and cosine decay.

    A step reads the number of the step, its batch and its rate from the device, so that a CUDA graph can replay it.
    """

    def __init__(self, model: Model, text: Tensor, places: Tensor, seqlen: int, peak_rate: float) -> None:
        num_steps, device = places.shape[0], text.device
        self.model, self.text, self.places = model, text, places
        self.window = torch.arange(seqlen + 1, device=device)
        self.parameters = [nn.Parameter(x.detach().float()) for x in model.parameters()]
        rate = torch.tensor(peak_rate, device=device)
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True, capturable=CUDA
        )
        self.rate, self.peak_rate, self.rates = rate, peak_rate, torch.zeros(num_steps, device=device)
        self.decay(num_steps)
        self.step_index = torch.zeros(1, dtype=torch.int64, device=device)
        self.losses = torch.zeros(num_steps, device=device)
        self.stream = torch.cuda.Stream() if CUDA else None
        self.next: Callable[[], None] = self.step

    def decay(self, num_steps: int) -> None:
        """Set the rates of all steps, past ones too: they rise for a twentieth, then fall to a tenth of the peak."""
        steps = torch.arange(len(self.rates), device=self.rates.device)
        warmup = num_steps // 20
        cosine = 0.55 + 0.45 * torch.cos(math.pi * ((steps - warmup) / (num_steps - warmup)).clamp(0, 1))
        self.rates.copy_(self.peak_rate * torch.minimum((steps + 1) / (warmup + 1), cosine))

    def step(self) -> None:
        """Do one training step."""
        parameters = list(self.model.parameters())
        self.rate.copy_(self.rates.index_select(0, self.step_index)[0])
        places = self.places.index_select(0, self.step_index)[0]
        loss = self.model(self.text[places[:, None] + self.window].long())
        for parameter, gradient in zip(self.parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = gradient.float()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(parameters, self.parameters)
        self.losses.index_copy_(0, self.step_index, loss.detach()[None])
        self.step_index += 1

    def advance(self) -> None:
        """Start a step; on a GPU it runs in the background."""
        with torch.cuda.stream(self.stream):
            self.next()

    def capture(self) -> None:
        """Capture a step on a GPU; steps before it have compiled the kernels and made the optimizer's state."""
        if self.stream is not None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self.stream):
                self.step()
            self.next = graph.replay


def main(args: list[str] | None = None) -> None:
    """Train all runs, print the final losses, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seconds", type=float, default=150, help="time for the steps of all runs")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--only", default="", help="only runs with this pattern in their name; some in bf16, too")
    parser.add_argument("--peak_rate", type=float, default=1e-3, help="largest learning rate")
    for name, value in Shape._field_defaults.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args(args)
    seeds = [int(seed) for seed in options.seeds.split(",")]
    shape = Shape(*(getattr(options, name) for name in Shape._fields))
    device = torch.device("cuda" if CUDA else "cpu")
    text, held_out = (x.to(device) for x in read_text())
    sequences = text_at(held_out, even_places(held_out, shape.seqlen, HELD_OUT_SEQUENCES, device), shape.seqlen)

    places = {seed: random_places(text, shape, options.steps, seed).to(device) for seed in seeds}
    runs = {
        (variant, name, seed): Run(
            new_model(shape, qk_norm, choice, seed, device), text, places[seed], shape.seqlen, options.peak_rate
        )
        for variant, qk_norm in VARIANTS.items()
        for name, choice in CHOICES.items()
        if re.search(options.only, f"{variant}, {name}")
        for seed in seeds
    }
    first = {variant: run.model for (variant, name, seed), run in runs.items() if (name, seed) == ("bf16", seeds[0])}
    layers = {variant: {"start": gradient_errors(model, sequences)} for variant, model in first.items()}
    began = time.perf_counter()
    steps = train(list(runs.values()), options.steps, options.seconds)
    seconds = time.perf_counter() - began
    results = {
        "environment": describe("lightning"),
        "about": about(shape, steps, seeds, options.peak_rate, first.values()),
        "steps": steps,
        "seconds": round(seconds, 1),
        "curves": {variant: curves(runs, variant, steps) for variant in first},
        "final": {variant: final_losses(runs, variant, steps, sequences) for variant in first},
        "layers": layers,
    }
    print(json.dumps(results["final"], indent=1), flush=True)
    write(results, options.json)  # now as well, so that an interrupted run keeps its losses
    for variant, model in first.items():
        layers[variant]["end"] = gradient_errors(model, sequences)
    write(results, options.json)


def write(results: dict[str, Any], path: Path | None) -> None:
    """Write the results, if a file was asked for."""
    if path is not None:
        path.write_text(json.dumps(results) + "\n")


def read_text() -> tuple[Tensor, Tensor]:
    """Return the text to train on and the held-out text: bytes of Python's sources, int16, a separator before files."""
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for name, path in text_files():
        parts[is_held_out(name)].append(path.read_bytes())
    separator = torch.tensor([SEPARATOR], dtype=torch.int16)
    train, held_out = (
        torch.cat([y for x in part for y in (separator, torch.frombuffer(bytearray(x), dtype=torch.uint8).short())])
        for part in parts
    )
    return train, held_out


def random_places(text: Tensor, shape: Shape, num_steps: int, seed: int) -> Tensor:
    """Return the first token of each sequence of each step: (num_steps, batch), int64."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(len(text) - shape.seqlen - 1, (num_steps, shape.batch), generator=generator)


def even_places(text: Tensor, seqlen: int, count: int, device: torch.device) -> Tensor:
    """Return the first tokens of sequences at equal distances: (count,), int64."""
    return torch.linspace(0, len(text) - seqlen - 1, count, device=device).long()


def text_at(text: Tensor, places: Tensor, seqlen: int) -> Tensor:
    """Return sequences of the text: (len(places), seqlen + 1), int64."""
    return text[places[:, None] + torch.arange(seqlen + 1, device=text.device)].long()


def gradient_errors(model: Model, sequences: Tensor) -> dict[str, Any]:
    """Return `fp8_layers.errors` of the model on one held-out sequence, for each choice once."""
    choices = {name: choice for name, choice in CHOICES.items() if name != "bf16 again"}
    return fp8_layers.errors(deepcopy(model), sequences[:1], choices)  # a copy: autograd remembers a stream


def train(runs: list[Run], num_steps: int, seconds: float) -> int:
    """Train all runs at the same time, and return the number of steps that fitted into `seconds`."""
    _advance(runs, NUM_EAGER_STEPS)
    for run in runs:
        run.capture()
    began, done = time.perf_counter(), NUM_EAGER_STEPS
    _advance(runs, NUM_TIMED_STEPS)
    of_step, done = (time.perf_counter() - began) / NUM_TIMED_STEPS, done + NUM_TIMED_STEPS
    steps = min(num_steps, done + int(seconds / of_step))
    print(f"{of_step:.4f} s for a step of all runs, {steps} steps", flush=True)
    for run in runs:
        run.decay(steps)
    while done < steps:
        count = min(250, steps - done)
        _advance(runs, count)
        done += count
        losses = ", ".join(f"{run.losses[done - 1].item():.3f}" for run in runs[:: -(-len(runs) // 10)])
        print(f"step {done}: {losses}", flush=True)
    return steps


def _advance(runs: list[Run], num_steps: int) -> None:
    """Take a number of steps with all runs, in turns."""
    for _ in range(num_steps):
        for run in runs:
            run.advance()
    if CUDA:
        torch.cuda.synchronize()


def final_losses(
    runs: dict[tuple[str, str, int], Run], variant: str, steps: int, sequences: Tensor
) -> dict[str, dict[str, list[float]]]:
    """Return, by choice and for each seed, the loss of the last steps and of held-out text, in nats per byte."""
    found: dict[str, dict[str, list[float]]] = {}
    last = max(1, int(LAST_STEPS * steps))
    for (of, name, _), run in runs.items():
        if of == variant:
            found.setdefault(name, {"train": [], "held_out": []})
            found[name]["train"].append(round(run.losses[steps - last : steps].double().mean().item(), 5))
            with torch.no_grad():
                parts = [run.model(part).item() for part in sequences.split(8)]
            found[name]["held_out"].append(round(sum(parts) / len(parts), 5))
    return found


def curves(runs: dict[tuple[str, str, int], Run], variant: str, steps: int) -> dict[str, list[float]]:
    """Return, by choice, the loss as a mean over the seeds and over parts of equal length."""
    found = {}
    for name in dict.fromkeys(name for of, name, _ in runs if of == variant):
        losses = torch.stack(
            [run.losses[:steps] for (of, which, _), run in runs.items() if (of, which) == (variant, name)]
        )
        parts = losses.double().mean(0).tensor_split(min(NUM_POINTS, steps))
        found[name] = [round(part.mean().item(), 4) for part in parts]
    return found


def about(shape: Shape, steps: int, seeds: list[int], peak_rate: float, models: Iterable[Model]) -> str:
    """Say what was trained."""
    parameters = max(sum(x.numel() for x in model.parameters()) for model in models)
    return (
        f"Decoder of {parameters / 1e6:.1f} M parameters: {shape.layers} layers of width {shape.width}, "
        f"{shape.width // HEAD_DIM} / {shape.width // HEAD_DIM // 2} heads of {HEAD_DIM}, bf16 with fp32 parameters in "
        f"AdamW (peak rate {peak_rate:g}, cosine), bytes of Python's own sources, {shape.batch} sequences of "
        f"{shape.seqlen} tokens a step, {steps} steps, seeds {', '.join(map(str, seeds))}. Losses in nats per byte; "
        f"train is the mean of the last {100 * LAST_STEPS:.0f}% of the steps, held_out of {HELD_OUT_SEQUENCES} "
        "sequences, separately for each seed; curves are means over the seeds."
    )


if __name__ == "__main__":
    main()
