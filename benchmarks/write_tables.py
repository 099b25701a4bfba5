"""Write the tables, quoted figures and example programs of README.md and docs/ from results and examples/.

python -m benchmarks.write_tables

The tables of docs/measurements.md are in the site only: mkdocs.yml names this file as a hook.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks.environment import ROOT
from benchmarks.quotes import RESULTS, write_quotes
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
    for path, name, table in tables():
        page = root / path
        page.write_text(replace(page.read_text(), name, _link(name) if page.name == EVERY_ROW else table, path))
    write_quotes(root)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return the text of a page of the site, in which measurements.md has its tables instead of links to results."""
    if page.file.src_uri == EVERY_ROW:
        for path, name, table in tables():
            if Path(path).name == EVERY_ROW:
                markdown = replace(markdown, name, table, path)
    return markdown


def _link(name: str) -> str:
    """Return a link to the result of a table, which may be one of several tables of that result."""
    result = name if (RESULTS / f"{name}.json").exists() else name.rpartition("_")[0]
    return f"[{name}](../benchmarks/results/{result}.json)"


def tables() -> Iterator[tuple[str, str, str]]:
    """Return the page, name and text of every table."""
    for name, result in _of_results("multi_gpu_*"):
        write = beside_table if name.startswith("multi_gpu_beside") else multi_gpu_table
        yield "docs/measurements.md", name, write(result)
    for name, result in _of_results("kernel_errors_*"):
        yield "docs/measurements.md", name, errors_table(result)
    for name, result in _of_results("kernels_*"):
        yield "docs/measurements.md", name, kernel_table(result)
        if any("ringflash FP8" in row["tflops"] for row in result["results"]):
            page = "docs/fp8.md" if name.startswith("kernels_fp8_") else "docs/measurements.md"
            yield page, f"{name}_fp8", fp8_kernel_tables(result)
    for name, result in _of_results("ring_*"):
        yield "docs/measurements.md", name, ring_table(result)
    for name, result in _of_results("ring_documents_*"):
        yield "docs/masks.md", name, ring_documents_table(result)
    for name, result in _of_results("training_*"):
        write = steps_tables if name.startswith("training_whole") else training_table
        yield "docs/measurements.md", name, write(result)
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
    for name, result in _of_results("blocks_1x*"):
        yield "docs/decisions/0011-blocks-of-keys.md", name, blocks_table(result)
    for name, result in _of_results("fp8_forward_variants_*"):
        yield "docs/log/2026-11-25.md", name, fp8_variants_table(result)
    for name, result in _of_results("fp8_errors_*"):
        yield "docs/fp8.md" if name == "fp8_errors_cpu" else "docs/log/2026-11-25.md", name, fp8_errors_table(result)
    for name, result in _of_results("fp8_training_*"):
        page = "docs/measurements.md" if name == "fp8_training_1xh200" else "docs/fp8.md"
        yield page, name, fp8_losses_table(result)
        yield "docs/measurements.md", f"{name}_layers", fp8_layers_table(result)
    for name, result in _of_results("fp8_steps_*"):
        yield "docs/measurements.md" if "without" in name else "docs/fp8.md", name, fp8_steps_table(result)
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


def multi_gpu_table(result: dict) -> str:
    """Tabulate the largest error over budget by tensor, and its case."""
    rows = [
        f"| `{name}` | {worst['max']:.2f} | {worst['mean']:.2f} | {worst['case']} |"
        for name, worst in result["worst"].items()
    ]
    lines = [_source_of_cases(result), "", "| tensor | max | mean | case of the largest max |", "|---|---|---|---|"]
    return "\n".join([*lines, *rows])


def beside_table(result: dict) -> str:
    """Tabulate the mean error over budget of each contender by tensor, the largest of all chunks and ranks."""
    rows, before = [], ""
    for name, spent in result["cases"].items():
        case, contender = name.split(": ")
        shape = case if case != before else ""
        before = case
        means = " | ".join(f"{spent[tensor]['mean']:.3f}" for tensor in BESIDE)
        rows.append(f"| {shape} | {contender} | {means} |")
    head = [f"| case | | {' | '.join(f'`{x}`' for x in BESIDE)} |", "|---" * (2 + len(BESIDE)) + "|"]
    return "\n".join([_source_of_cases(result), "", *head, *rows])


def blocks_table(result: dict) -> str:
    """Tabulate the TFLOP/s of a rank's kernels, forward / backward, in blocks of keys and by sections."""
    ways = [way for way in result["rows"][0] if way not in ("tokens", "rank", "blocks")]
    rows = []
    for row in result["rows"]:
        speeds = (f"{row[way]['forward']:.0f} / {row[way]['backward']:.0f}" for way in ways)
        place = "middle" if row["rank"] else "first"
        rows.append(f"| {row['tokens'] // 1024}k | {place} | {' | '.join(speeds)} |")
    about = result["environment"]
    source = f"`{about['command']}` on {about['device']}, torch {about['torch']}, commit {about['commit']}."
    head = [f"| tokens a GPU | rank | {' | '.join(ways)} |", "|---" * (2 + len(ways)) + "|"]
    return "\n".join([source, "", *head, *rows])


def errors_table(result: dict) -> str:
    """Tabulate the mean error over budget of our kernels and the peers, by tensor."""
    rows = []
    for case, found in result["cases"].items():
        means = ([found[impl][name]["mean"] for impl in KERNELS] for name in ("out", "lse", *BESIDE[1:]))
        cells = (" / ".join(f"{mean:.3f}" for mean in three) for three in means)
        rows.append(f"| {case} | {' | '.join(cells)} |")
    versions = ", ".join(f"{name} {result[name]}" for name in ("torch", "triton", "flash-attn-4"))
    source = (
        f"`{result['command']}` on {result['device']}, {versions}, commit {result['commit']}; {' / '.join(KERNELS)}:"
    )
    head = ["| head_dim, tokens | `out` | `lse` | `dq` | `dk` | `dv` |", "|---|---|---|---|---|---|"]
    return "\n".join([source, "", *head, *rows])


def _source_of_cases(result: dict) -> str:
    return (
        f"`{result['command']}` on {result['device']}, torch {result['torch']}, NCCL {result['nccl']}, "
        f"commit {result['commit']}: {result['num_cases']} cases in {result['dtype']}."
    )


def kernel_table(result: dict) -> str:
    """Tabulate the TFLOP/s of every row, and the ratio of ours to each peer's."""
    about = result["environment"]
    peers = ("flash-attn-4", "cuDNN")
    rows = []
    for row in result["results"]:
        ours = row["tflops"]["ringflash"]
        ratios = [f"{ours / row['tflops'][peer]:.2f}" if peer in row["tflops"] else "" for peer in peers]
        rows.append(f"| {row['row']} | {row['pass']} | {ours:.0f} | {' | '.join(ratios)} |")
    versions = ", ".join(f"{name} {about[name]}" for name in ("torch", "triton", "flash-attn-4", "cudnn"))
    device, commit = about.get("device", about.get("gpu")), about["commit"]
    source = f"`{about['command']}` on {device}, {versions}, commit {commit}."
    head = ["| heads, length | pass | TFLOP/s | / flash-attn-4 | / cuDNN |", "|---|---|---|---|---|"]
    return "\n".join([source, "", *head, *rows])


def ring_table(result: dict) -> str:
    """Tabulate the percentage of the ideal that every contender reaches."""
    about, notes = result["environment"], [result.get("about", ""), _untimed(result["results"])]
    names = list(dict.fromkeys(name for row in result["results"] for name in row["percent"]))
    rows = [
        f"| {row['row']} | {row['pass']} | {row['ideal_ms']:.2f} | "
        + " | ".join(f"{row['percent'][name]:.1f}" if name in row["percent"] else "" for name in names)
        + " |"
        for row in result["results"]
    ]
    versions = ", ".join(f"{name} {about[name]}" for name in ("torch", "triton"))
    source = (
        f"`torchrun --nproc-per-node {result['ranks']} {about['command']}` on {about['device']}, {versions}, "
        f"NCCL {about['nccl']}, commit {about['commit']}. {' '.join(filter(None, notes))}".rstrip()
    )
    head = [f"| | pass | ideal, ms | {' | '.join(names)} |", "|---|---|---|" + "---|" * len(names)]
    return "\n".join([source, "", *head, *rows])


def fp8_kernel_tables(result: dict) -> str:
    """Tabulate the TFLOP/s of FP8 beside the bf16 kernel: forward with and without the quantiser, backward."""
    about = result["environment"]
    lines = [
        f"`{about['command']}` on {about['device']}, torch {about['torch']}, triton {about['triton']}, "
        f"commit {about['commit']}; TFLOP/s, in brackets relative to bf16."
    ]
    passes = {
        "forward": {"FP8": "ringflash FP8", "with quantiser": "ringflash FP8 with quantiser"},
        "backward": {f'`"{x}"`': f"ringflash FP8, {x}" for x in ("bf16", "fp8_scores", "fp8")},
    }
    for name, columns in passes.items():
        lines += ["", f"| {name} | bf16 kernel | {' | '.join(columns)} |", "|---" * (2 + len(columns)) + "|"]
        for row in result["results"]:
            tflops = row["tflops"]
            if row["pass"] == name and any(x in tflops for x in columns.values()):
                bf16 = tflops["ringflash"]
                cells = (f"{tflops[x]:.0f} ({tflops[x] / bf16:.2f})" if x in tflops else "" for x in columns.values())
                lines.append(f"| {row['row']} | {bf16:.0f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def fp8_variants_table(result: dict) -> str:
    """Tabulate the median TFLOP/s of trial variants of the FP8 forward, run by run."""
    about = result["environment"]
    lines = [f"{about['command'].capitalize()}, {about['device']}; TFLOP/s. {about['note'].capitalize()}."]
    for run in (1, 2):
        found = {row["row"]: row["tflops"] for row in result["rows"] if row["run"] == run and "tflops" in row}
        lines += ["", f"| run {run} | {' | '.join(found)} |", "|---" * (1 + len(found)) + "|"]
        for name in dict.fromkeys(name for tflops in found.values() for name in tflops):
            figures = (f"{tflops[name]:.0f}" if name in tflops else "" for tflops in found.values())
            lines.append(f"| {name} | {' | '.join(figures)} |")
    return "\n".join(lines)


def fp8_errors_table(result: dict) -> str:
    """Tabulate the errors of FP8 attention by head_dim and kind of numbers, of `benchmarks/fp8_errors.py`."""
    names = ("out", "dq", "dk", "dv")
    lines = [
        f"`{result['command']}`, {result['impl']}, {result['seqlen']:,} tokens, causal, commit {result['commit']}.",
        "",
        f"| head_dim, numbers | {' | '.join(f'`{name}`' for name in names)} | `out`, rms | `lse`, rms / largest |",
        "|---" * (3 + len(names)) + "|",
    ]
    for case in result["cases"]:
        errors = " | ".join(f"{case[name]:.1%}" for name in names)
        lse = f"{case['lse_rms']:.1e} / {case['lse_max']:.2f}"
        lines.append(f"| {case['head_dim']}, {case['numbers']} | {errors} | {case['out_rms']:.1e} | {lse} |")
    return "\n".join(lines)


def ring_documents_table(result: dict) -> str:
    """Tabulate the percentage of the ideal for packed documents by layout and transport: forward / both passes."""
    names = [
        f"ringflash, {transport}{layout}"
        for transport in ("copy_engine", "nccl")
        for layout in ("", ", striped", ", balanced")
    ]
    rows: dict[str, dict[str, list[str]]] = {}
    for row in result["results"]:
        cells = rows.setdefault(row["row"].split(", ")[-1].partition(" of ")[2] or "128 to 32k", {})
        for name, percent in row["percent"].items():
            cells.setdefault(name, []).append(f"{percent:.0f}")
    head = [
        "| tokens of a document | copy engine: zigzag | striped | balanced | NCCL: zigzag | striped | balanced |",
        "|---" * (1 + len(names)) + "|",
    ]
    lines = [
        f"| {mix} | {' | '.join(' / '.join(cells.get(name, [])) for name in names)} |" for mix, cells in rows.items()
    ]
    about = result["environment"]
    return "\n".join([f"{about['device']}, commit {about['commit']}.", "", *head, *lines])


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
            rows.append(f"| {variant}, {name} | {' | '.join(cells)} |")
    about = result["environment"]
    versions = ", ".join(f"{name} {about[name]}" for name in ("torch", "triton"))
    source = f"`{about['command']}` on {about['device']}, {versions}, commit {about['commit']}. {result['about']}"
    head = ["| | training loss | from bf16 | held-out loss | from bf16 |", "|---|---|---|---|---|"]
    return "\n".join([source, "", *head, *rows])


def fp8_steps_table(result: dict) -> str:
    """Tabulate the timed steps of `benchmarks/train_steps.py --attention` with their parts."""
    names = ("attention", "linear", "other", "idle")
    rows = [
        f"| {step['attention']} | {step['seconds']:.2f} | "
        + " | ".join(f"{step['parts'][name]:.2f}" for name in names)
        + f" | {step['mfu_percent']:.1f}% | {step['mfu_percent'] / FP8_PER_BF16:.1f}% | {step['loss']:.3f} |"
        for step in result["steps"]
        if step["kind"] == "timed"
    ]
    versions = ", ".join(f"{name} {result[name]}" for name in ("torch", "triton", "lightning", "transformers"))
    source = (
        f"`{result['command']}` on {result['device']}, {versions}, commit {result['commit']}; in the order of the run."
    )
    head = [
        f"| attention | s | {' | '.join(f'{name}, s' for name in names)} | MFU by bf16 peak | by FP8 peak | loss |",
        "|---" * (len(names) + 5) + "|",
    ]
    return "\n".join([source, "", *head, *rows])


def fp8_layers_table(result: dict) -> str:
    """Tabulate, by layer, the errors of dq, dk and dv of each choice of attention, and of the parameters' gradient."""
    rows = []
    for variant, moments in result["layers"].items():
        for when, found in moments.items():
            for layer in range(len(next(iter(found["parameters"].values())))):
                cells = []
                for name, errors in found["attention"].items():
                    three = " / ".join(f"{100 * errors[layer][x]:.1f}" for x in BESIDE[1:])
                    cells.append(f"{three}; {100 * found['parameters'][name][layer]:.1f}")
                rows.append(f"| {variant}, {when}, {layer} | {' | '.join(cells)} |")
    names = list(next(iter(next(iter(result["layers"].values())).values()))["attention"])
    return "\n".join([f"| model, time, layer | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|", *rows])


def _untimed(results: list[dict]) -> str:
    """Return the rows whose ideal was only timed with our kernel."""
    rows = list(dict.fromkeys(row["row"] for row in results if not any("flash-attn-4" in name for name in row["ms"])))
    if not rows:
        return ""
    every = len(rows) == len({row["row"] for row in results})
    which = "every row" if every else f"rows of {' and '.join(row.split(', ')[-1] for row in rows)}"
    around = " and Ulysses is around it" if any("Ulysses" in row["percent"] for row in results) else ""
    return f"flash-attn-4 was not timed in {which}: the ideal is of our kernel{around}."


def training_table(result: dict) -> str:
    """Tabulate the last step of every run and its plan."""
    rows = []
    for run in result["runs"]:
        last = run["steps"][-1]
        pairs = [(run["memory_gib"], run["planned_memory_gib"]), (run["step_seconds"], run["planned_step_seconds"])]
        cells = [
            f"{measured:.2f} | {planned:.2f} ({100 * (planned / measured - 1):+.0f}%)" for measured, planned in pairs
        ]
        rows.append(
            f"| {run['layers']} | {run['seqlen']:,} | {run['visible_fraction']:.2f} | {' | '.join(cells)} | "
            f"{last['tflops_per_rank']:.0f} | {last['mfu_percent']:.1f}% |"
        )
    source = (
        f"`{result['command']}` on {result['device']}, torch {result['torch']}, triton {result['triton']}, "
        f"lightning {result['lightning']}, commit {result['commit']}. {result['about']}"
    )
    head = [
        "| layers | tokens | visible | GiB | planned | s a step | planned | model TFLOP/s a GPU | MFU |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([source, "", *head, *rows])


def trees_table(result: dict) -> str:
    """Tabulate the same as `documents_table` of documents that continue others."""
    return documents_table(result, "documents that continue others")


def two_sided_table(result: dict) -> str:
    """Tabulate the speed of our kernels by mask, and its share of the causal kernel's at equal pairs."""
    rows = [
        f"| {row['case']} | {row['forward']:.0f} ({row['forward_share']:.2f}) "
        f"| {row['backward']:.0f} ({row['backward_share']:.2f}) |"
        for row in result["results"]
        if "forward_share" in row
    ]
    return "\n".join([_source(result), "", "| mask | forward | backward |", "|---|---|---|", *rows])


def two_sided_beside_table(result: dict) -> str:
    """Tabulate the speed of ours and other libraries by mask, forward / backward."""
    found = [row for row in result["results"] if "beside" in row]
    names = list(dict.fromkeys(name for row in found for name in row["beside"]))
    rows = []
    for row in found:
        cells = (" / ".join(f"{x:.0f}" for x in row["beside"].get(name, ())) for name in names)
        rows.append(f"| {row['case']} | {' | '.join(cells)} |")
    return "\n".join([_source(result), "", f"| mask | {' | '.join(names)} |", "|---|" + "---|" * len(names), *rows])


def prefixes_table(result: dict) -> str:
    """Tabulate tokens, pairs and milliseconds with one prompt for all answers, and with one each."""
    seconds, ways = result["seconds"], ("shared", "unshared")
    rows = [("tokens", {way: f"{result['tokens'][way]:,}" for way in ways})]
    rows += [("visible pairs, in 10^9", {way: f"{result['pairs'][way] / 1e9:.1f}" for way in ways})]
    for part in dict.fromkeys(name.split(", ")[0] for name in seconds):
        times = {way: seconds.get(f"{part}, {way}") for way in ways}
        rows.append((f"{part}, ms", {way: "" if x is None else f"{1e3 * x:.0f}" for way, x in times.items()}))
    lines = [f"| {name} | {cells['shared']} | {cells['unshared']} |" for name, cells in rows]
    return "\n".join([_source(result), "", "| | one prompt | one each |", "|---|---|---|", *lines])


def _source(result: dict) -> str:
    about = result["environment"]
    return f"`{about['command']}`, {about['device']}, torch {about['torch']}, commit {about['commit']}."


def documents_table(result: dict, column: str = "tokens of a document") -> str:
    """Tabulate balance, received shards and messages of every layout by mix of documents and number of ranks."""
    layouts, cells = list(dict.fromkeys(row["layout"] for row in result["results"])), {}
    for row in result["results"]:
        cell = f"{row['balance_percent']:.0f} ({row['worst_percent']:.0f}); {row['shards']:.2g}; {row['messages']:.0f}"
        cells.setdefault((row["mix"], row["ranks"]), []).append(cell)
    about = result["environment"]
    source = f"`{about['command']}`, commit {about['commit']}, {result['packings']} packings of each mix."
    head = [f"| {column} | ranks | {' | '.join(layouts)} |", "|---|---|" + "---|" * len(layouts)]
    rows = [f"| {mix} | {ranks} | {' | '.join(row)} |" for (mix, ranks), row in cells.items()]
    return "\n".join([source, "", *head, *rows])


def torchtitan_table(result: dict) -> str:
    """Tabulate tokens/s and memory of torchtitan's steps by length, and how far its losses and gradients agree."""
    head = "| tokens | torchtitan's own | ringflash | ratio | losses differ by | norms of gradients by |"
    lines = [_source_of_trainer(result, "torchtitan"), "", head, "|---|---|---|---|---|---|"]
    rows = {(row["seqlen"], row["attention"]): row for row in result["rows"]}
    for seqlen in dict.fromkeys(row["seqlen"] for row in result["rows"]):
        ring, flex = rows[seqlen, "ring"], rows[seqlen, "flex"]
        speeds = (f"{row['tokens_per_s']:,} tokens/s, {row['memory_gib']:.1f} GiB" for row in (flex, ring))
        differ = (
            max(abs(x / y - 1) for x, y in zip(ring[kind], flex[kind], strict=True))
            for kind in ("losses", "gradient_norms")
        )
        ratio = f"{ring['tokens_per_s'] / flex['tokens_per_s']:.2f}"
        lines.append(_row(f"{seqlen:,}", *speeds, ratio, *(f"{x:.0e}" for x in differ)))
    profiled = [row for row in result["rows"] if "parts" in row]
    if profiled:
        kinds = [kind for kind in profiled[0]["parts"] if any(row["parts"][kind] for row in profiled)]
        lines += ["", _row("seconds of one step", *kinds), f"{'|---' * (len(kinds) + 1)}|"]
    for row in profiled:
        name = "ringflash" if row["attention"] == "ring" else "torchtitan's own"
        lines.append(_row(f"{name}, {row['seqlen']:,}", *(f"{row['parts'][kind]:.3f}" for kind in kinds)))
    return "\n".join(lines)


def megatron_table(result: dict) -> str:
    """Tabulate milliseconds of Megatron's steps by length, and the largest difference of a gradient."""
    names = {
        "own": "Megatron's attention, one GPU", "one": "ringflash, one GPU", "ring": "ring of two GPUs",
        "engine one": "Transformer Engine, one GPU", "engine ring": "Transformer Engine, two GPUs",
    }  # fmt: skip
    names = {way: name for way, name in names.items() if any(row["way"] == way for row in result["rows"])}
    lines = [_source_of_trainer(result, "megatron-core"), "", _row("tokens", *names.values(), "gradients differ by")]
    lines.append(f"{'|---' * (len(names) + 2)}|")
    for tokens, packed in dict.fromkeys((row["tokens"], row["packed"]) for row in result["rows"]):
        ways = {row["way"]: row for row in result["rows"] if (row["tokens"], row["packed"]) == (tokens, packed)}
        shown = (
            f"{1000 * ways[way]['seconds']:.0f} ms, {ways[way]['allocated_gib']:.1f} GiB" if way in ways else ""
            for way in names
        )
        name = f"{tokens:,}, four documents" if packed else f"{tokens:,}"
        lines.append(_row(name, *shown, f"{max(row['error'] for row in ways.values()):.1e}"))
    return "\n".join(lines)


def _source_of_trainer(result: dict, package: str) -> str:
    names = {name: result[name] for name in (package, "torch", "triton")}
    versions = ", ".join(f"{name} {version}" for name, version in names.items())
    return f"`{result['command']}`, commit {result['commit']}: {result['device']}, {versions}."


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def steps_of_documents_table(result: dict) -> str:
    """Tabulate how equal the work of the sequences of a step is, by the order in which documents were packed."""
    about, orders = result["environment"], ("shuffled", "mixed", "sorted")
    rows = [
        f"| {row['mix']} | {row['seqlen']:,} | {row['data_ranks']} | {' | '.join(f'{row[x]:.0f}' for x in orders)} |"
        for row in result["steps"]
    ]
    head = [
        "| tokens of a document | of a sequence | sequences of a step | shuffled | mixed by length | and sorted |",
        "|---|---|---|---|---|---|",
    ]
    return "\n".join([f"`{about['command']}`, commit {about['commit']}.", "", *head, *rows])


def steps_tables(result: dict) -> str:
    """Tabulate the measurements of `benchmarks/train_steps.py` by length with the plan, and the parts of a step."""
    lengths = list(dict.fromkeys(step["seqlen"] for step in result["steps"] if step["kind"] == "timed"))
    of_kind = {
        kind: {seqlen: [x for x in result["steps"] if (x["kind"], x["seqlen"]) == (kind, seqlen)] for seqlen in lengths}
        for kind in ("timed", "waits")
    }
    plans = result["plans"]
    rows = [
        _steps_row(of_kind["timed"][seqlen], of_kind["waits"][seqlen], plans.get(str(seqlen))) for seqlen in lengths
    ]
    packages = ("torch", "triton", "lightning", "transformers", "liger-kernel")
    versions = ", ".join(f"{name} {result[name]}" for name in packages)
    source = (
        f"`torchrun --nproc-per-node {result['ranks']} {result['command']}` on {result['device']}, {versions}, commit "
        f"{result['commit']}. The model was built in {result['built_seconds']:.0f} s."
    )
    head = [
        "| tokens | s of each step | planned then | tokens/s a GPU | MFU | GiB | planned then | ring waits, ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([source, "", *head, *rows, *_parts_table([of_kind["timed"][seqlen][-1] for seqlen in lengths])])


def _steps_row(steps: list[dict], waits: list[dict], plan: dict | None) -> str:
    """Return the row of one length: the seconds of all its steps, and the other figures of the last one."""
    last = steps[-1]
    gib, seconds = last["allocated_gib"] + last["areas_gib"], ", ".join(f"{step['seconds']:.2f}" for step in steps)
    planned = {"seconds": "", "gib": ""}
    if plan is not None:
        uncounted = ("fragmentation", "CUDA and libraries")
        bytes_ = sum(value for name, value in plan["memory_bytes"].items() if name not in uncounted)
        of_step = sum(plan["step_seconds"].values())
        planned = {
            "seconds": f"{of_step:.2f} ({100 * (of_step / last['seconds'] - 1):+.0f}%)",
            "gib": f"{bytes_ / 2**30:.1f} ({100 * (bytes_ / 2**30 / gib - 1):+.0f}%)",
        }
    mfu = "" if last["mfu_percent"] is None else f"{last['mfu_percent']:.1f}%"
    waited = ", ".join(f"{step['exposed_communication_ms']:.0f}" for step in waits)
    return (
        f"| {last['seqlen']:,} | {seconds} | {planned['seconds']} | {last['tokens_per_second_per_gpu']:,.0f} | {mfu} | "
        f"{gib:.1f} | {planned['gib']} | {waited} |"
    )


def _parts_table(steps: list[dict]) -> list[str]:
    """Tabulate seconds and percent of each part of the traced steps; empty if there are none."""
    traced = [step for step in steps if "parts" in step]
    if not traced:
        return []
    names = list(traced[0]["parts"])
    rows = [
        f"| {step['seqlen']:,} | "
        + " | ".join(f"{step['parts'][x]:.2f} ({100 * step['parts'][x] / step['seconds']:.1f}%)" for x in names)
        + f" | {sum(step['parts'].values()):.2f} |"
        for step in traced
    ]
    return ["", f"| s of | {' | '.join(names)} | together |", "|---|" + "---|" * (len(names) + 1), *rows]


if __name__ == "__main__":
    main()
