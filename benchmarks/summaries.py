"""Tables that summarize several committed results, for the pages that explain them."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Iterator
from math import prod

from benchmarks.quotes import load, table

PEERS = ("flash-attn-4", "cuDNN")
H200 = ("kernels_hd128_1xh200", "kernels_other_heads_1xh200")
H100 = ("kernels_hd128_1xh100", "kernels_other_heads_1xh100")
COPY_ENGINE, GRAPH, NCCL = "ringflash, copy_engine", "ringflash, copy_engine, CUDA graph", "ringflash, nccl"
PASSES = ("forward", "forward + backward")
AIMS = {  # percent of the ideal on eight GPUs: forward, both passes
    ("4096", COPY_ENGINE): (80, 85),
    ("8192", COPY_ENGINE): (93, 94),
    ("32768", COPY_ENGINE): (97, 98),
    ("65536", COPY_ENGINE): None,
    ("131072", COPY_ENGINE): (98.5, 99),
    ("8192", NCCL): (85, 90),
    ("131072", NCCL): (97, 98),
}
CASES = {
    "multi_gpu_hopper_2xh200": "`hopper`, two H200s",
    "multi_gpu_hopper_4xh200": "`hopper`, four H200s",
    "multi_gpu_shared_8ranks_1xh200": "`hopper`, eight ranks on one H200",
    "multi_gpu_shared_fp16_8ranks_1xh200": "`hopper`, eight ranks on one H200",
    "multi_gpu_copy_engine_2ranks_1xh200": "`hopper`, head_dim 96 to 256, copy engine, two ranks on one H200",
    "multi_gpu_million_4ranks_1xh200": "`hopper`, 1,048,576 tokens, four ranks on one H200",
    "multi_gpu_random_2xh200": "`hopper`, random calls, two H200s",
    "multi_gpu_by_host_4ranks_1xh100": "`hopper`, `by_host` and `ulysses`, four ranks on one H100",
    "multi_gpu_flash2_4ranks_1xh200": "`flash2`, four ranks on one H200",
    "multi_gpu_flash2_fp16_4ranks_1xh200": "`flash2`, four ranks on one H200",
}
TRAINED = ("training_whole_8xh200", "training_whole_1m_4xh200", "training_whole_2xh200", "training_whole_1xh200")
STEP_HEAD = ("H200s", "tokens", "precision", "s a step", "MFU", "GiB in use of 140")


def errors() -> str:
    """Tabulate the largest error of each set of cases, as a fraction of its budget."""
    tensors = ("out", "lse", "dq", "dk", "dv")
    rows = []
    for name in CASES:
        result = load(name)
        dtype = {"bfloat16": "bf16", "float16": "fp16"}[result["dtype"]]
        cells = [_limited(result["worst"][tensor]["max"]) for tensor in tensors]
        rows.append([f"{CASES[name]}, {dtype}", f"{result['num_cases']}", *cells, result["commit"]])
    return table(["largest error / budget", "cases", *(f"`{x}`" for x in tensors), "commit"], rows)


def _limited(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio <= 1 else f"**{ratio:.2f}**"


def kernels() -> str:
    """Tabulate the geometric mean and the minimum of our speed relative to the peers, by card and head_dim."""
    rows = []
    for name in (*H200, *H100):
        about = load(name)["environment"]
        card = about["device"].removeprefix("1 x NVIDIA ").partition(" ")[0]
        for label, passes in _compared(name).items():
            cells = [
                f"{_mean(passes[x], peer):.2f} ({_least(passes[x], peer):.2f})" if x in passes else ""
                for x in ("forward", "backward")
                for peer in PEERS
            ]
            rows.append([f"{card}, {about['commit']}", label, f"{len(passes['forward'])}", *cells])
    head = ["card, commit", "head_dim", "rows", *(f"{x} / {peer}" for x in ("forward", "backward") for peer in PEERS)]
    return "Geometric mean, in brackets the least row:\n\n" + table(head, rows)


def _compared(*names: str) -> dict[str, dict[str, list[dict]]]:
    """Collect the TFLOP/s of the rows of results on which peers were timed, by head_dim and pass."""
    groups: dict[str, dict[str, list[dict]]] = {}
    for row in (row for name in names for row in load(name)["results"]):
        if PEERS[0] in row["tflops"]:
            head_dim, tokens, *_ = row["row"].removeprefix("hd").split()
            label = f"{head_dim}, {tokens} tokens" if tokens in ("1k", "2k") else head_dim
            groups.setdefault(label, {}).setdefault(row["pass"], []).append(row["tflops"])
    return groups


def _ratios(rows: Iterable[dict], peer: str) -> list[float]:
    return [row["ringflash"] / row[peer] for row in rows]


def _mean(rows: list[dict], peer: str) -> float:
    return prod(_ratios(rows, peer)) ** (1 / len(rows))


def _least(rows: list[dict], peer: str) -> float:
    return min(_ratios(rows, peer))


def kernel_aims() -> str:
    """Tabulate the aims of the kernels and the results."""
    groups = _compared(*H200)
    rows = {
        row["row"]: row["tflops"]["ringflash"]
        for name in H200
        for row in load(name)["results"]
        if row["pass"] != "forward"
    }
    wide = [
        rows[f"hd192 16k x 1, 16/16, {mask}"] / rows[f"hd128 16k x 1, 16/16, {mask}"] for mask in ("causal", "full")
    ]
    reached = [
        ["head_dim 64 backward, mean over flash-attn-4", f"{_mean(groups['64']['backward'], PEERS[0]):.3f}", "1.0"],
        [
            "head_dim 64 forward, least row over flash-attn-4",
            f"{_least(groups['64']['forward'], PEERS[0]):.3f}",
            "0.95",
        ],
        ["head_dim 192 backward, part of head_dim 128's TFLOP/s", " and ".join(f"{x:.2f}" for x in wide), "0.85"],
    ]
    return table(["missed aim", "reached", "aim"], reached)


def kernel_errors() -> str:
    """Tabulate the mean errors of our kernels relative to those of flash-attn-4."""
    cases = load("kernel_errors_1xh200")["cases"].values()
    found = {
        tensor: [case["hopper"][tensor]["mean"] / case["fa4"][tensor]["mean"] for case in cases]
        for tensor in ("out", "lse", "dq", "dk", "dv")
    }
    rows = [
        [f"`{tensor}`", f"{prod(ratios) ** (1 / len(ratios)):.3f}", f"{min(ratios):.3f}", f"{max(ratios):.3f}"]
        for tensor, ratios in found.items()
    ]
    return table(["mean error / flash-attn-4's", "geometric mean of the cases", "least", "largest"], rows)


def ring() -> str:
    """Tabulate the percentage of the ideal on eight GPUs, ours and the peers'."""
    columns = {
        "4k": ("ring_8xh200", "4096", "causal"),
        "8k": ("ring_8xh200", "8192", "causal"),
        "32k": ("ring_8xh200_32k", "32768", "causal"),
        "128k, four GPUs": ("ring_4xh200_128k", "131072", "causal"),
        "128k, window 8,192": ("ring_8xh200_128k", "131072", "window"),
        "128k, documents": ("ring_8xh200_128k", "131072", "documents"),
    }
    names = {
        "copy engine": COPY_ENGINE,
        "copy engine, CUDA graph": GRAPH,
        "copy engine, striped": "ringflash, copy_engine, striped",
        "NCCL": NCCL,
        "Ulysses": "Ulysses",
        "ring-flash-attention": "ring-flash-attention",
        "torch context_parallel (MHA)": "torch context_parallel (MHA)",
    }
    rows = [[label, *(_both(*column, name) for column in columns.values())] for label, name in names.items()]
    return table(["tokens a GPU", *columns], rows)


def aims() -> str:
    """Tabulate the percentage of the ideal by number of GPUs (brackets: from a CUDA graph), with the aims for eight."""
    machines = {
        "2 GPUs": ("ring_short_2xh200", "ring_2xh200"),
        "4 GPUs": ("ring_4xh200", "ring_4xh200_128k"),
        "8 GPUs": ("ring_8xh200", "ring_8xh200_32k"),
    }
    rows = []
    for (tokens, name), aim in AIMS.items():
        label = f"{int(tokens) // 1024}k" + (", NCCL" if name == NCCL else "")
        cells = []
        for files in machines.values():
            found = [x for file in files if (x := _both(file, tokens, "causal", name))]
            graphs = [x for file in files if name == COPY_ENGINE and (x := _both(file, tokens, "causal", GRAPH))]
            cells.append(" ".join([*found[:1], *(f"({x})" for x in graphs[:1])]))  # the first file is the newest
        reached = _percents(machines["8 GPUs"], tokens, name)
        missed = aim and reached and any(x < y for x, y in zip(reached, aim, strict=True))
        goal = " / ".join(f"{x:g}" for x in aim) if aim else ""
        rows.append([label, *cells, goal + (", missed" if missed else ", not measured" if aim and not reached else "")])
    return table(["tokens a GPU", *machines, "aim for 8 GPUs"], rows)


def _percents(files: Iterable[str], tokens: str, name: str) -> list[float]:
    return [x for file in files for kind in PASSES for x in _percent(file, tokens, "causal", kind, name)]


def _percent(file: str, tokens: str, mask: str, kind: str, name: str, heads: str = "32/8 heads of 128") -> list[float]:
    wanted = f"{tokens} tokens a rank, {heads}, {mask}"
    rows = [row for row in load(file)["results"] if (row["row"], row["pass"]) == (wanted, kind)]
    return [row["percent"][name] for row in rows if name in row["percent"]]


def _both(file: str, tokens: str, mask: str, name: str, heads: str = "32/8 heads of 128") -> str:
    return " / ".join(f"{x:.0f}" for kind in PASSES for x in _percent(file, tokens, mask, kind, name, heads))


def training() -> str:
    """Tabulate the longest step of Qwen3-8B on each number of GPUs, with its exposed parts."""
    rows = []
    for result, steps in _longest():
        parts = steps[-1]["parts"]
        exposed = [f"{parts[name]:.1f}" for name in ("communication", "host copies", "idle")]
        rows.append([*_step(result, steps[-1]), *exposed, "first" if len(steps) == 1 else "second", result["commit"]])
    head = [*STEP_HEAD, "exposed communication, s", "exposed copies, s", "idle, s", "step at this length", "commit"]
    return table(head, rows)


def _longest() -> Iterator[tuple[dict, list[dict]]]:
    """Yield each result with its timed steps of the longest sequence."""
    for name in TRAINED:
        result = load(name)
        timed = [step for step in result["steps"] if step["kind"] == "timed"]
        yield result, [step for step in timed if step["seqlen"] == max(other["seqlen"] for other in timed)]


def _step(result: dict, step: dict) -> list[str]:
    figures = f"{step['seconds']:.1f}", f"{step['mfu_percent']:.1f}%", f"{step['device_gib']:.0f}"
    return [f"{result['ranks']}", f"{step['seqlen']:,}", result["precision"], *figures]


def triton_3_9() -> str:
    """Tabulate the speed of kernels with triton 3.9, relative to 3.6: least, median and most by head_dim."""
    run = load("triton_releases_1xh200")
    names = {
        ("ringflash", "forward"): "forward",
        ("ringflash", "backward"): "backward",
        ("ringflash, deterministic", "backward"): "deterministic",
    }
    ratios: dict[str, dict[tuple[str, str], list[float]]] = {}
    for result in run["results"]:
        of_head, tflops = ratios.setdefault(result["row"].split()[0], {}), result["tflops"]
        for name, direction in names:
            if direction == result["pass"] and f"3.6 {name}" in tflops:
                of_head.setdefault((name, direction), []).append(tflops[f"3.9 {name}"] / tflops[f"3.6 {name}"])
    rows = [[head, *(_spread(of_head.get(name, [])) for name in names)] for head, of_head in sorted(ratios.items())]
    about = run["environment"]
    line = (
        f"`{about['command']}` on {about['device']}, torch {about['torch']}, commit {about['commit']}; ratio 3.9 / 3.6:"
    )
    return f"{line}\n\n{table(['head_dim', *names.values()], rows)}"


def _spread(values: list[float]) -> str:
    """Return least, median and most."""
    return f"{min(values):.2f}, {statistics.median(values):.2f}, {max(values):.2f}" if values else ""


def eager() -> str:
    """Tabulate rows of the ring on two GPUs, from a CUDA graph and eagerly."""
    rows = []
    for tokens, heads in (
        *((f"{length * 1024}", "32/8 heads of 128") for length in (4, 8, 32)),
        ("8192", "32/32 heads of 128"),
        ("8192", "32/8 heads of 64"),
    ):
        cells = (_both("ring_short_2xh200", tokens, "causal", name, heads) for name in (GRAPH, COPY_ENGINE, NCCL))
        rows.append([f"{int(tokens) // 1024}k, {heads}", *cells])
    return table(["tokens a GPU, heads", "from a CUDA graph", "eagerly", "eagerly, NCCL"], rows)


def recorded_calls() -> str:
    """Tabulate short rows on two GPUs before and after calls of one form were recorded, in one lease."""
    columns = {}
    for file, name in (
        ("ring_host_before_2xh100", COPY_ENGINE),
        ("ring_host_2xh100", COPY_ENGINE),
        ("ring_host_2xh100", GRAPH),
    ):
        commit = load(file)["environment"]["commit"]
        columns[f"{'from a CUDA graph' if name == GRAPH else 'eagerly'} ({commit})"] = file, name
    rows = [
        [
            f"{int(tokens) // 1024}k, {heads}",
            *(_both(file, tokens, "causal", name, heads) for file, name in columns.values()),
        ]
        for tokens, heads in (("4096", "32/8 heads of 128"), ("8192", "32/32 heads of 128"))
    ]
    return table(["tokens a GPU, heads", *columns], rows)


def host_times() -> str:
    """Tabulate the microseconds in which a host issues a call, before and after calls of one form were recorded."""
    results = [load(name) for name in ("host_time_2xh200", "host_time_recorded_2xh200")]
    rows = [
        [f"{result['device']}, {result['commit']}", *(f"{us:,.0f}" for us in result["microseconds"].values())]
        for result in results
    ]
    return table(["machine, commit", *results[0]["microseconds"]], rows)


def ring_fp8() -> str:
    """Tabulate the percentage of the ideal that rings of two GPUs reach in FP8."""
    mask = "causal, hopper_fp8_all"
    names = {"copy engine": COPY_ENGINE, "copy engine, CUDA graph": GRAPH, "NCCL": NCCL}
    rows = [
        [f"{int(tokens) // 1024}k", label, *_both("ring_fp8_2xh200", tokens, mask, name).split(" / ")]
        for tokens in ("32768", "16384", "8192", "4096")
        for label, name in names.items()
    ]
    return table(["tokens a GPU", "over", "forward", "both passes"], rows)


def fp8_steps() -> str:
    """Tabulate the fastest step of each kind of attention and linear layers, relative to bf16."""
    steps, commits = {}, {}
    for ranks, linear in itertools.product((1, 2), ("bf16", "FP8")):
        result = load(f"fp8_steps_eight_layers_{'' if linear == 'bf16' else 'float8_'}{ranks}xh200")
        timed = [step for step in result["steps"] if step["kind"] == "timed"]
        for step in sorted(timed, key=lambda step: -step["seconds"]):
            steps[ranks, step["seqlen"], step["attention"], linear] = step
        commits[result["commit"]] = None
    rows = []
    for (ranks, seqlen, attention, linear), step in sorted(steps.items()):
        ratio = steps[ranks, seqlen, "hopper", "bf16"]["seconds"] / step["seconds"]
        figures = f"{step['seconds']:.2f} ({ratio:.2f})", f"{step['mfu_percent']:.1f}%", f"{step['device_gib']:.0f}"
        rows.append([f"{ranks}", f"{seqlen:,}", f"`{attention}`", linear, *figures])
    head = [
        "H200s",
        "tokens",
        "attention",
        "linear layers",
        "s a step (speed / bf16)",
        "MFU by bf16 peak",
        "GiB in use",
    ]
    return f"Commit {' and '.join(commits)}:\n\n{table(head, rows)}"


def trainer() -> str:
    """Tabulate the speed and memory of Trainer with our backend and with torch's."""
    result = load("trainer_2xh100")
    gib = {turn["cp_backend"]: turn["allocated_gib"] for turn in result["turns"]}
    rows = [[f'`"{name}"`', f"{speed:,.0f}", f"{gib[name]:.1f}"] for name, speed in result["tokens_per_second"].items()]
    return table(["`cp_backend`", "tokens/s", "GiB allocated"], rows)


def trainer_errors() -> str:
    """Tabulate the largest error of a gradient over its budget, in a step of Trainer on two GPUs."""
    cases = load("steps_of_trainer_2xh100")["cases"]
    names = {"llama": "Llama", "qwen3_5": "Qwen3.5", "granitemoehybrid": "Granite 4"}
    rows = [
        [
            label,
            *(f"{cases[f'trainer {name} torch.{dtype}']['gradient']['max']:.3f}" for dtype in ("float64", "bfloat16")),
        ]
        for name, label in names.items()
    ]
    return table(["", "fp64", "bf16"], rows)


def loss_curves_on_cpus() -> str:
    """Tabulate how far losses of several ranks are from those of one, on CPUs in fp64."""
    result = load("loss_curves_cpu")
    one, *others = result["losses"].items()
    rows = []
    for ranks, losses in others:
        apart = [abs(loss / first - 1) for loss, first in zip(losses, one[1], strict=True)]
        rows.append([f"cp={ranks}", f"{max(apart[:100]):.1e}", f"{max(apart):.1e}"])
    return table(["against cp=1, relative", "steps 1 to 100", "steps 1 to 200"], rows)


def loss_curves_on_gpus() -> str:
    """Tabulate the largest difference from the losses of one GPU, in bf16 and FP8."""
    names = {
        "loss_curves_h200": "four H200s",
        "loss_curves_8xh200": "eight H200s",
        "loss_curves_2xh200": "two H200s",
        "loss_curves_fp8_2xh200": "two H200s in FP8, `hopper_fp8_all`",
    }
    rows = []
    for name, machine in names.items():
        result = load(name)
        for run, apart in result["apart"].items():
            rows.append([machine, f"cp={run}", f"{apart:.2%}", result["environment"]["commit"]])
    return table(["machine", "run", "largest difference", "commit"], rows)


SUMMARIES = {
    "docs/performance.md": {
        "kernel_means": kernels,
        "kernel_aims": kernel_aims,
        "ring_aims": aims,
        "ring_beside": ring,
        "ring_eager": eager,
        "host_times": host_times,
        "training_steps": training,
    },
    "docs/decisions/0001-environment.md": {"triton_3_9": triton_3_9},
    "docs/decisions/0017-tape.md": {"recorded_calls": recorded_calls},
    "docs/numerics.md": {
        "errors": errors,
        "errors_beside": kernel_errors,
        "loss_curves_on_cpus": loss_curves_on_cpus,
        "loss_curves_on_gpus": loss_curves_on_gpus,
    },
    "docs/fp8.md": {"ring_fp8": ring_fp8, "fp8_steps": fp8_steps},
    "docs/accelerate.md": {"trainer": trainer, "trainer_errors": trainer_errors},
}
