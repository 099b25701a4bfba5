"""Write the tables, quoted figures and example programs of README.md and docs/ from results and examples/.

python -m benchmarks.write_tables

The tables of docs/measurements.md are in the site only: mkdocs.yml names this file as a hook.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks.environment import ROOT
from benchmarks.quotes import RESULTS, table, write_quotes
from benchmarks.summaries import SUMMARIES
from ringflash.huggingface.flops import FP8_PER_BF16

BESIDE = ("out", "dq", "dk", "dv")
KERNELS = ("hopper", "fa4", "flash2")
EXAMPLES = {
    "docs/wrapping.md": ("train_loop",),
    "docs/lightning.md": ("lightning_module",),
    "docs/accelerate.md": ("hf_trainer",),
    "docs/deepspeed.md": ("deepspeed_zero",),
}
BEGIN, END = "<!-- begin {name} -->", "<!-- end {name} -->"
EVERY_ROW = "measurements.md"


def main(root: Path = ROOT) -> None:
    """Replace every table between markers, and every quoted figure."""
    for path, name, text in tables():
        page = root / path
        if page.name != EVERY_ROW:
            page.write_text(replace(page.read_text(), name, text, path))
    write_quotes(root)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return the text of a page of the site, in which measurements.md has its tables instead of links to results."""
    if page.file.src_uri == EVERY_ROW:
        for path, name, text in tables():
            if Path(path).name == EVERY_ROW:
                markdown = markdown.replace(link(name), f"\n{text}\n")
    return markdown


def link(name: str) -> str:
    """Return a link to the result of a table, which may be one of several tables of that result."""
    result = name if (RESULTS / f"{name}.json").exists() else name.rpartition("_")[0]
    return f"[{name}](../benchmarks/results/{result}.json)"


def tables() -> Iterator[tuple[str, str, str]]:
    """Return the page, name and text of every table."""
    for name, result in _of_results("multi_gpu_*"):
        yield "docs/measurements.md", name, multi_gpu_table(result)
    for name, result in _of_results("kernel_errors_*"):
        yield "docs/measurements.md", name, errors_table(result)
    for name, result in _of_results("kernels_*"):
        yield "docs/measurements.md", name, kernel_table(result)
        if any(contender.startswith("ringflash FP8") for row in result["results"] for contender in row["tflops"]):
            page = "docs/fp8.md" if name.startswith("kernels_fp8_") else "docs/measurements.md"
            yield page, f"{name}_fp8", fp8_kernel_tables(result)
    for name, result in _of_results("ring_*"):
        yield "docs/measurements.md", name, ring_table(result)
    for name, result in _of_results("ring_documents_*"):
        yield "docs/masks.md", name, ring_documents_table(result)
    for name, result in _of_results("training_*"):
        yield "docs/measurements.md", name, steps_tables(result)
    for name, result in _of_results("documents"):
        yield "docs/masks.md", name, documents_table(result)
        yield "docs/data.md", "steps_of_documents", steps_of_documents_table(result)
    for name, result in _of_results("trees"):
        yield "docs/masks.md", name, trees_table(result)
    for pattern, write in (
        ("two_sided_1x*", two_sided_table),
        ("two_sided_beside_*", two_sided_beside_table),
        ("prefixes_*", prefixes_table),
    ):
        for name, result in _of_results(pattern):
            yield "docs/masks.md", name, write(result)
    for name, result in _of_results("fp8_errors_cpu"):
        yield "docs/fp8.md", name, fp8_errors_table(result)
    for name, result in _of_results("fp8_training_*"):
        yield "docs/fp8.md", name, fp8_losses_table(result)
        yield "docs/measurements.md", f"{name}_layers", fp8_layers_table(result)
    for name, result in _of_results("fp8_steps_*"):
        yield "docs/measurements.md", name, fp8_steps_table(result)
    for name, result in _of_results("torchtitan_*"):
        yield "docs/torchtitan.md", name, torchtitan_table(result)
    for name, result in _of_results("megatron_*"):
        yield "docs/megatron.md", name, megatron_table(result)
    for page, names in EXAMPLES.items():
        for name in names:
            yield page, name, f"```python\n{(ROOT / 'examples' / name).with_suffix('.py').read_text()}```"
    for page, summaries in SUMMARIES.items():
        for name, summary in summaries.items():
            yield page, name, summary()


def _of_results(pattern: str) -> Iterator[tuple[str, dict]]:
    for path in sorted(RESULTS.glob(f"{pattern}.json")):
        yield path.stem, json.loads(path.read_text())


def replace(text: str, name: str, table: str, path: str) -> str:
    """Return the text of the page at `path` with another table between the markers of `name`.

    Raises:
        ValueError: the page does not have these markers.
    """
    begin, end = BEGIN.format(name=name), END.format(name=name)
    if begin not in text or end not in text:
        raise ValueError(f"{path} must have the lines {begin!r} and {end!r}, got neither; add them.")
    head, rest = text.split(begin)
    return f"{head}{begin}\n{table}\n{end}{rest.split(end)[1]}"


def _page(source: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table after the line that says how it was measured."""
    return f"{source}\n\n{table(head, rows)}"


def _measured(result: dict, *packages: str, by: str = "") -> str:
    """Say how a result was measured: command, machine, versions and commit.

    Args:
        by: beginning of the command.
    """
    about = result.get("environment", result)
    versions = ", ".join(f"{'NCCL' if name == 'nccl' else name} {about[name]}" for name in packages)
    return f"`{by}{about['command']}` on {about['device']}, {versions}, commit {about['commit']}"


def _cases(result: dict) -> str:
    return f"{_measured(result, 'torch', 'nccl')}: {result['num_cases']} cases in {result['dtype']}."


def multi_gpu_table(result: dict) -> str:
    """Tabulate the largest error over budget by tensor, and its case."""
    rows = (
        (f"`{name}`", f"{worst['max']:.2f}", f"{worst['mean']:.2f}", worst["case"])
        for name, worst in result["worst"].items()
    )
    return _page(_cases(result), ("tensor", "max", "mean", "case of the largest max"), rows)


def errors_table(result: dict) -> str:
    """Tabulate the mean error over budget of our kernels and the peers, by tensor."""
    tensors, rows = ("out", "lse", *BESIDE[1:]), []
    for case, found in result["cases"].items():
        means = ([f"{found[impl][name]['mean']:.3f}" for impl in KERNELS] for name in tensors)
        rows.append((case, *map(" / ".join, means)))
    source = f"{_measured(result, 'torch', 'triton', 'flash-attn-4')}; {' / '.join(KERNELS)}:"
    return _page(source, ("head_dim, tokens", *(f"`{x}`" for x in tensors)), rows)


def kernel_table(result: dict) -> str:
    """Tabulate the TFLOP/s of every row, and the ratio of ours to each peer's."""
    peers, rows = ("flash-attn-4", "cuDNN"), []
    for row in result["results"]:
        ours = row["tflops"]["ringflash"]
        ratios = (f"{ours / row['tflops'][peer]:.2f}" if peer in row["tflops"] else "" for peer in peers)
        rows.append((row["row"], row["pass"], f"{ours:.0f}", *ratios))
    source = f"{_measured(result, 'torch', 'triton', 'flash-attn-4', 'cudnn')}."
    return _page(source, ("heads, length", "pass", "TFLOP/s", *(f"/ {peer}" for peer in peers)), rows)


def ring_table(result: dict) -> str:
    """Tabulate the percentage of the ideal that every contender reaches."""
    notes = [result.get("about", ""), _untimed(result["results"])]
    names = list(dict.fromkeys(name for row in result["results"] for name in row["percent"]))
    rows = (
        (
            row["row"],
            row["pass"],
            f"{row['ideal_ms']:.2f}",
            *(f"{row['percent'][name]:.1f}" if name in row["percent"] else "" for name in names),
        )
        for row in result["results"]
    )
    about = _measured(result, "torch", "triton", "nccl", by=f"torchrun --nproc-per-node {result['ranks']} ")
    return _page(f"{about}. {' '.join(filter(None, notes))}".rstrip(), ("", "pass", "ideal, ms", *names), rows)


def fp8_kernel_tables(result: dict) -> str:
    """Tabulate the TFLOP/s of FP8 beside the bf16 kernel: forward with and without the quantiser, backward."""
    parts = [f"{_measured(result, 'torch', 'triton')}; TFLOP/s, in brackets relative to bf16."]
    passes = {
        "forward": {"FP8": "ringflash FP8", "with quantiser": "ringflash FP8 with quantiser"},
        "backward": {f'`"{x}"`': f"ringflash FP8, {x}" for x in ("bf16", "fp8_scores", "fp8")},
    }
    for name in dict.fromkeys(row["pass"] for row in result["results"]):
        columns, rows = passes[name], []
        for row in result["results"]:
            tflops = row["tflops"]
            if row["pass"] == name and any(x in tflops for x in columns.values()):
                bf16 = tflops["ringflash"]
                cells = (f"{tflops[x]:.0f} ({tflops[x] / bf16:.2f})" if x in tflops else "" for x in columns.values())
                rows.append((row["row"], f"{bf16:.0f}", *cells))
        parts.append(table((name, "bf16 kernel", *columns), rows))
    return "\n\n".join(parts)


def fp8_errors_table(result: dict) -> str:
    """Tabulate the errors of FP8 attention by head_dim and kind of numbers."""
    source = f"`{result['command']}`, {result['impl']}, {result['seqlen']:,} tokens, causal, commit {result['commit']}."
    head = ("head_dim, numbers", *(f"`{name}`" for name in BESIDE), "`out`, rms", "`lse`, rms / largest")
    rows = (
        (
            f"{case['head_dim']}, {case['numbers']}",
            *(f"{case[name]:.1%}" for name in BESIDE),
            f"{case['out_rms']:.1e}",
            f"{case['lse_rms']:.1e} / {case['lse_max']:.2f}",
        )
        for case in result["cases"]
    )
    return _page(source, head, rows)


def ring_documents_table(result: dict) -> str:
    """Tabulate the percentage of the ideal for packed documents by layout and transport: forward / both passes."""
    names = [
        f"ringflash, {transport}{layout}"
        for transport in ("copy_engine", "nccl")
        for layout in ("", ", striped", ", balanced")
    ]
    cells: dict[str, dict[str, list[str]]] = {}
    for row in result["results"]:
        found = cells.setdefault(row["row"].split(", ")[-1].partition(" of ")[2] or "128 to 32k", {})
        for name, percent in row["percent"].items():
            found.setdefault(name, []).append(f"{percent:.0f}")
    layouts = ("copy engine: zigzag", "striped", "balanced", "NCCL: zigzag", "striped", "balanced")
    rows = ((mix, *(" / ".join(found.get(name, [])) for name in names)) for mix, found in cells.items())
    about = result["environment"]
    return _page(f"{about['device']}, commit {about['commit']}.", ("tokens of a document", *layouts), rows)


def fp8_losses_table(result: dict) -> str:
    """Tabulate the final losses of each choice of attention, and their differences from the first with its noise."""
    rows = []
    for variant, choices in result["final"].items():
        first = next(iter(choices))
        for name, losses in choices.items():
            cells = []
            for which in ("train", "held_out"):
                apart = [100 * (x / base - 1) for x, base in zip(losses[which], choices[first][which], strict=True)]
                spread = f"{mean(apart):+.2f} ± {stdev(apart) / len(apart) ** 0.5:.2f}%" if name != first else ""
                cells += [f"{mean(losses[which]):.4f}", spread]
            rows.append((f"{variant}, {name}", *cells))
    source = f"{_measured(result, 'torch', 'triton')}."
    return _page(source, ("", "training loss", "from bf16", "held-out loss", "from bf16"), rows)


def fp8_steps_table(result: dict) -> str:
    """Tabulate the timed steps of `benchmarks/train_steps.py --attention`: all seconds, and the parts of the last."""
    names = ("attention", "linear", "other", "idle")
    groups: dict[tuple[int, str], list[dict]] = {}
    for step in result["steps"]:
        if step["kind"] == "timed":
            groups.setdefault((step["seqlen"], step["attention"]), []).append(step)
    rows = (
        (
            f"{seqlen:,}",
            attention,
            ", ".join(f"{step['seconds']:.2f}" for step in steps),
            *(f"{steps[-1]['parts'][name]:.2f}" for name in names),
            f"{steps[-1]['mfu_percent']:.1f}%",
            f"{steps[-1]['mfu_percent'] / FP8_PER_BF16:.1f}%",
            f"{steps[-1]['loss']:.3f}",
        )
        for (seqlen, attention), steps in groups.items()
    )
    launch = f"torchrun --nproc-per-node {result['ranks']} " if result["ranks"] > 1 else ""
    source = f"{_measured(result, 'torch', 'triton', 'lightning', 'transformers', by=launch)}."
    head = ("tokens", "attention", "s of each step", *(f"{name}, s" for name in names))
    return _page(source, (*head, "MFU by bf16 peak", "by FP8 peak", "loss"), rows)


def fp8_layers_table(result: dict) -> str:
    """Tabulate, by layer, the errors of dq, dk and dv of each choice of attention, and of the parameters' gradient."""
    rows, names = [], ()
    for variant, moments in result["layers"].items():
        for when, found in moments.items():
            names = tuple(found["attention"])
            for layer in range(len(next(iter(found["parameters"].values())))):
                cells = []
                for name, errors in found["attention"].items():
                    three = " / ".join(f"{100 * errors[layer][x]:.1f}" for x in BESIDE[1:])
                    cells.append(f"{three}; {100 * found['parameters'][name][layer]:.1f}")
                rows.append((f"{variant}, {when}, {layer}", *cells))
    return table(("model, time, layer", *names), rows)


def _untimed(results: list[dict]) -> str:
    """Return the rows whose ideal was only timed with our kernel."""
    rows = list(dict.fromkeys(row["row"] for row in results if not any("flash-attn-4" in name for name in row["ms"])))
    if not rows:
        return ""
    every = len(rows) == len({row["row"] for row in results})
    which = "every row" if every else f"rows of {' and '.join(row.split(', ')[-1] for row in rows)}"
    around = " and Ulysses is around it" if any("Ulysses" in row["percent"] for row in results) else ""
    return f"flash-attn-4 was not timed in {which}: the ideal is of our kernel{around}."


def trees_table(result: dict) -> str:
    """Tabulate the same as `documents_table` of documents that continue others, without the rows of two ranks."""
    rows = [row for row in result["results"] if row["ranks"] > 2]
    return documents_table({**result, "results": rows}, "documents that continue others")


def two_sided_table(result: dict) -> str:
    """Tabulate the speed of our kernels by mask, and its share of the causal kernel's at equal pairs."""
    rows = (
        (row["case"], *(f"{row[way]:.0f} ({row[f'{way}_share']:.2f})" for way in ("forward", "backward")))
        for row in result["results"]
        if "forward_share" in row
    )
    return _page(f"{_measured(result, 'torch')}.", ("mask", "forward", "backward"), rows)


def two_sided_beside_table(result: dict) -> str:
    """Tabulate the speed of ours and other libraries by mask, forward / backward."""
    found = [row for row in result["results"] if "beside" in row]
    names = list(dict.fromkeys(name for row in found for name in row["beside"]))
    rows = (
        (row["case"], *(" / ".join(f"{x:.0f}" for x in row["beside"].get(name, ())) for name in names)) for row in found
    )
    return _page(f"{_measured(result, 'torch')}.", ("mask", *names), rows)


def prefixes_table(result: dict) -> str:
    """Tabulate tokens, pairs and milliseconds with one prompt for all answers, and with one each."""
    seconds, ways = result["seconds"], ("shared", "unshared")
    rows = [("tokens", *(f"{result['tokens'][way]:,}" for way in ways))]
    rows += [("visible pairs, in 10^9", *(f"{result['pairs'][way] / 1e9:.1f}" for way in ways))]
    for part in dict.fromkeys(name.split(", ")[0] for name in seconds if "beside it" not in name):
        times = (seconds.get(f"{part}, {way}") for way in ways)
        rows.append((f"{part}, ms", *("" if x is None else f"{1e3 * x:.0f}" for x in times)))
    return _page(f"{_measured(result, 'torch')}.", ("", "one prompt", "one each"), rows)


def documents_table(result: dict, column: str = "tokens of a document") -> str:
    """Tabulate balance, received shards and messages of every layout by mix of documents and number of ranks."""
    layouts, cells = list(dict.fromkeys(row["layout"] for row in result["results"])), {}
    for row in result["results"]:
        cell = f"{row['balance_percent']:.0f} ({row['worst_percent']:.0f}); {row['shards']:.2g}; {row['messages']:.0f}"
        cells.setdefault((row["mix"], str(row["ranks"])), []).append(cell)
    about = result["environment"]
    source = f"`{about['command']}`, commit {about['commit']}, {result['packings']} packings of each mix."
    return _page(source, (column, "ranks", *layouts), ((*which, *row) for which, row in cells.items()))


def torchtitan_table(result: dict) -> str:
    """Tabulate tokens/s and memory of torchtitan's steps by length, and how far its losses and gradients agree."""
    found, rows = {(row["seqlen"], row["attention"]): row for row in result["rows"]}, []
    for seqlen in dict.fromkeys(row["seqlen"] for row in result["rows"]):
        ring, flex = found[seqlen, "ring"], found[seqlen, "flex"]
        speeds = (f"{row['tokens_per_s']:,} tokens/s, {row['memory_gib']:.1f} GiB" for row in (flex, ring))
        differ = (
            max(abs(x / y - 1) for x, y in zip(ring[kind], flex[kind], strict=True))
            for kind in ("losses", "gradient_norms")
        )
        ratio = f"{ring['tokens_per_s'] / flex['tokens_per_s']:.2f}"
        rows.append((f"{seqlen:,}", *speeds, ratio, *(f"{x:.0e}" for x in differ)))
    head = ("tokens", "torchtitan's own", "ringflash", "ratio", "losses differ by", "norms of gradients by")
    page = _page(f"{_measured(result, 'torchtitan', 'torch', 'triton')}.", head, rows)
    profiled = [row for row in result["rows"] if "parts" in row]
    if not profiled:
        return page
    kinds = [kind for kind in profiled[0]["parts"] if any(row["parts"][kind] for row in profiled)]
    names = {"ring": "ringflash", "flex": "torchtitan's own"}
    parts = (
        (f"{names[row['attention']]}, {row['seqlen']:,}", *(f"{row['parts'][kind]:.3f}" for kind in kinds))
        for row in profiled
    )
    return f"{page}\n\n{table(('seconds of one step', *kinds), parts)}"


def megatron_table(result: dict) -> str:
    """Tabulate milliseconds of Megatron's steps by length, and the largest difference of a gradient."""
    names = {
        "own": "Megatron's attention, one GPU", "one": "ringflash, one GPU", "ring": "ring of two GPUs",
        "engine one": "Transformer Engine, one GPU", "engine ring": "Transformer Engine, two GPUs",
    }  # fmt: skip
    names = {way: name for way, name in names.items() if any(row["way"] == way for row in result["rows"])}
    versions, more = ["megatron-core", "torch", "triton"], ["gradients differ by"]
    if "engine ring" in names:
        versions, more = [*versions, "transformer-engine"], ["time relative to the ring's", *more]
    rows = []
    for tokens, packed in dict.fromkeys((row["tokens"], row["packed"]) for row in result["rows"]):
        ways = {row["way"]: row for row in result["rows"] if (row["tokens"], row["packed"]) == (tokens, packed)}
        shown = [
            f"{1000 * ways[way]['seconds']:.0f} ms, {ways[way]['allocated_gib']:.1f} GiB" if way in ways else ""
            for way in names
        ]
        if "engine ring" in names:
            shown.append(f"{ways['engine ring']['seconds'] / ways['ring']['seconds']:.2f}")
        name = f"{tokens:,}, four documents" if packed else f"{tokens:,}"
        rows.append((name, *shown, f"{max(row['error'] for row in ways.values()):.1e}"))
    return _page(f"{_measured(result, *versions)}.", ("tokens", *names.values(), *more), rows)


def steps_of_documents_table(result: dict) -> str:
    """Tabulate how equal the work of the sequences of a step is, by the order in which documents were packed."""
    about, orders = result["environment"], ("shuffled", "mixed", "sorted")
    rows = (
        (row["mix"], f"{row['seqlen']:,}", f"{row['data_ranks']}", *(f"{row[x]:.0f}" for x in orders))
        for row in result["steps"]
    )
    head = ("tokens of a document", "of a sequence", "sequences of a step", "shuffled", "mixed by length", "and sorted")
    return _page(f"`{about['command']}`, commit {about['commit']}.", head, rows)


def steps_tables(result: dict) -> str:
    """Tabulate the measurements of `benchmarks/train_steps.py` by length with the plan, and the parts of a step."""
    lengths = list(dict.fromkeys(step["seqlen"] for step in result["steps"] if step["kind"] == "timed"))
    timed, waits = (
        [[x for x in result["steps"] if (x["kind"], x["seqlen"]) == (kind, seqlen)] for seqlen in lengths]
        for kind in ("timed", "waits")
    )
    plans = [result["plans"].get(str(seqlen)) for seqlen in lengths]
    about = _measured(
        result, "torch", "triton", "lightning", "transformers", "liger-kernel",
        by=f"torchrun --nproc-per-node {result['ranks']} ",
    )  # fmt: skip
    planned = ("s of each step", "planned then", "tokens/s a GPU", "MFU", "GiB", "planned then")
    rows = map(_steps_row, timed, waits, plans)
    steps = _page(
        f"{about}. The model was built in {result['built_seconds']:.0f} s.",
        ("tokens", *planned, "ring waits, ms"),
        rows,
    )
    traced = [of_length[-1] for of_length in timed if "parts" in of_length[-1]]
    return f"{steps}\n\n{_parts_table(traced)}" if traced else steps


def _steps_row(steps: list[dict], waits: list[dict], plan: dict | None) -> tuple[str, ...]:
    """Return the row of one length: the seconds of all its steps, and the other figures of the last one."""
    last = steps[-1]
    gib, seconds = last["allocated_gib"] + last["areas_gib"], ", ".join(f"{step['seconds']:.2f}" for step in steps)
    planned_seconds = planned_gib = ""
    if plan is not None:
        uncounted = ("fragmentation", "CUDA and libraries")
        of_plan = sum(value for name, value in plan["memory_bytes"].items() if name not in uncounted) / 2**30
        of_step = sum(plan["step_seconds"].values())
        planned_seconds = f"{of_step:.2f} ({100 * (of_step / last['seconds'] - 1):+.0f}%)"
        planned_gib = f"{of_plan:.1f} ({100 * (of_plan / gib - 1):+.0f}%)"
    mfu = "" if last["mfu_percent"] is None else f"{last['mfu_percent']:.1f}%"
    speed = f"{last['tokens_per_second_per_gpu']:,.0f}"
    waited = ", ".join(f"{step['exposed_communication_ms']:.0f}" for step in waits)
    return f"{last['seqlen']:,}", seconds, planned_seconds, speed, mfu, f"{gib:.1f}", planned_gib, waited


def _parts_table(steps: list[dict]) -> str:
    """Tabulate seconds and percent of each part of the traced steps."""
    rows = (
        (
            f"{step['seqlen']:,}",
            *(f"{x:.2f} ({100 * x / step['seconds']:.1f}%)" for x in step["parts"].values()),
            f"{sum(step['parts'].values()):.2f}",
        )
        for step in steps
    )
    return table(("s of", *steps[0]["parts"], "together"), rows)


if __name__ == "__main__":
    main()
