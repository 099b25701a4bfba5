"""Write the tables, quoted figures and example programs of README.md and docs/ from results and examples/.

python -m benchmarks.write_tables

mkdocs.yml names this file as a hook, by which links to results lead to the repository.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks.environment import ROOT
from benchmarks.quotes import RESULTS, table, write_quotes
from benchmarks.summaries import SUMMARIES

BESIDE = ("out", "dq", "dk", "dv")
EXAMPLES = {
    "docs/wrapping.md": ("train_loop",),
    "docs/lightning.md": ("lightning_module",),
    "docs/accelerate.md": ("hf_trainer",),
    "docs/deepspeed.md": ("deepspeed_zero",),
}
BEGIN, END = "<!-- begin {name} -->", "<!-- end {name} -->"
REPOSITORY = "https://github.com/ringflash/ringflash/blob/main"


def main(root: Path = ROOT) -> None:
    """Replace every table between markers, and every quoted figure."""
    for path, name, text in tables():
        page = root / path
        page.write_text(replace(page.read_text(), name, text, path))
    write_quotes(root)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return the text of a page of the site, which has no files of results."""
    return re.sub(r"\]\((?:\.\./)+benchmarks/", f"]({REPOSITORY}/benchmarks/", markdown)


def tables() -> Iterator[tuple[str, str, str]]:
    """Return the page, name and text of every table."""
    for pattern in ("kernels_hd128_1xh200", "kernels_other_heads_1xh200"):
        for name, result in _of_results(pattern):
            yield "docs/fp8.md", f"{name}_fp8", fp8_kernel_tables(result)
    for name, result in _of_results("ring_documents_*"):
        yield "docs/masks.md", name, ring_documents_table(result)
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


def _measured(result: dict, *packages: str) -> str:
    """Say how a result was measured: command, machine, versions and commit."""
    about = result.get("environment", result)
    versions = ", ".join(f"{'NCCL' if name == 'nccl' else name} {about[name]}" for name in packages)
    return f"`{about['command']}` on {about['device']}, {versions}, commit {about['commit']}"


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


if __name__ == "__main__":
    main()
