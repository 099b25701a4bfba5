"""Draw the SVG figures of docs/ from the schedule and the committed results.

python -m benchmarks.draw_figures
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import product
from xml.sax.saxutils import escape

from benchmarks.environment import ROOT
from benchmarks.quotes import RESULTS
from benchmarks.summaries import H200
from ringflash.sequence.layout import chunks

FIGURES = ROOT / "docs" / "figures"
COLORS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2")
BY_LENGTH = ("ringflash", "ringflash FP8", "ringflash FP8, fp8", "flash-attn-4", "cuDNN")
MESSAGE, GRADIENT, INK, PAPER = "#9ecae9", "#ffbf79", "#222222", "#ffffff"
CP_SIZE, SEQLEN = 4, 64


def main() -> None:
    """Write every figure."""
    FIGURES.mkdir(exist_ok=True)
    for name, svg in figures().items():
        (FIGURES / name).write_text(svg)


def figures() -> dict[str, str]:
    """Return the SVG text of every figure, by file name."""
    drawn = {"zigzag.svg": zigzag()}
    for path in sorted(RESULTS.glob("loss_curves_*.json")):
        drawn[f"{path.stem}.svg"] = loss_curves(json.loads(path.read_text()))
    for path in sorted(RESULTS.glob("fp8_training_*.json")):
        drawn[f"{path.stem}.svg"] = fp8_curves(json.loads(path.read_text()))
    drawn["ring_8xh200.svg"] = ring_beside_peers([*_results("ring_8xh200"), *_results("ring_8xh200_32k")])
    for path in sorted(RESULTS.glob("timeline_*.json")):
        drawn[f"{path.stem}.svg"] = measured_timeline(json.loads(path.read_text()))
    results = [row for name in H200 for row in _results(name)]
    for direction in dict.fromkeys(row["pass"] for row in results):
        chosen = [row for row in results if row["pass"] == direction]
        drawn[f"kernels_h200_{direction}.svg"] = by_length(chosen, direction)
    return drawn


def _results(name: str) -> list[dict]:
    return json.loads((RESULTS / f"{name}.json").read_text())["results"]


def zigzag() -> str:
    """Draw the pairs of chunks by rank, and by its distance from the owner of the keys: 4 ranks, causal."""
    cell, left, top = 44, 120, 60
    parts = [text(left + 4 * cell, 20, f"keys, in {2 * CP_SIZE} chunks of the whole sequence", anchor="middle")]
    for i in range(2 * CP_SIZE):
        owner = min(i, 2 * CP_SIZE - 1 - i)
        parts.append(text(left + (i + 0.5) * cell, 46, f"k{i}  r{owner}", size=12, anchor="middle"))
        parts.append(text(left - 10, top + (i + 0.6) * cell, f"q{i}  rank {owner}", size=12, anchor="end"))
    for rank in range(CP_SIZE):
        for distance, q, k, half in _pairs(rank):
            x, y = left + k * cell, top + q * cell
            corners = [(x, y), (x + cell, y + cell), (x, y + cell)]
            shape = polygon(corners, COLORS[distance]) if half else rect(x, y, cell, cell, COLORS[distance])
            parts += [shape, text(x + cell * (0.3 if half else 0.5), y + cell * 0.68, f"r{rank}", PAPER, 12, "middle")]
    right = left + 2 * CP_SIZE * cell + 24
    for distance, color in enumerate(COLORS):
        parts.append(rect(right, top + 30 * distance, 18, 18, color))
        parts.append(text(right + 26, top + 30 * distance + 14, f"distance {distance}"))
    return document(right + 130, top + 2 * CP_SIZE * cell + 16, parts)


def _pairs(rank: int) -> Iterable[tuple[int, int, int, bool]]:
    """Yield (distance, query chunk, key chunk, True on the diagonal) of all pairs that a rank computes."""
    size = SEQLEN // (2 * CP_SIZE)
    shards = [chunks(SEQLEN, CP_SIZE, owner, "zigzag") for owner in range(CP_SIZE)]
    for owner, keys in enumerate(shards):
        for q, k in product(shards[rank], keys):
            if q.start >= k.start:
                yield (rank - owner) % CP_SIZE, q.start // size, k.start // size, q.start == k.start


def measured_timeline(result: dict) -> str:
    """Draw the timeline of one rank's device in a forward and backward, by kind of work."""
    lanes = {"kernel": ("forward", "backward"), "messages": ("message",), "waits": ("wait",), "the rest": ("other",)}
    colors = {"forward": COLORS[0], "backward": COLORS[1], "message": MESSAGE, "wait": INK, "other": GRADIENT}
    left, top, width, row, spans = 90, 30, 760, 34, result["spans"]
    scale = width / max(span["start_us"] + span["us"] for span in spans)
    parts = [text(left, 18, f"{result['row']}, {result['environment']['device']}, rank 1", size=12)]
    for i, (lane, kinds) in enumerate(lanes.items()):
        y = top + row * i
        parts += [text(left - 8, y + 18, lane, size=12, anchor="end"), rect(left, y, width, row - 8, "#f4f4f4")]
        for span in (span for span in spans if span["kind"] in kinds):
            x, wide = left + scale * span["start_us"], max(3.0, scale * span["us"])
            parts.append(rect(x, y, wide, row - 8, colors[span["kind"]]))
            if wide > 60:
                parts.append(text(x + wide / 2, y + 18, f"{span['us'] / 1e3:.1f} ms", PAPER, 12, "middle"))
    return document(left + width + 20, top + row * len(lanes) + 4, parts)


def loss_curves(result: dict) -> str:
    """Draw the loss by step for each number of ranks; lines for fewer ranks are wider and so remain visible."""
    losses, left, top, width, height = result["losses"], 60, 30, 620, 260
    highest = max(max(curve) for curve in losses.values())
    parts = [text(left, 18, f"training loss by step, {result['precision']}, {result['environment']['device']}")]
    parts += scale(left, top, width, height, range(int(highest) + 1), highest)
    for i, (color, (size, curve)) in enumerate(zip(COLORS, losses.items(), strict=False)):
        points = [(left + width * s / len(curve), top + height * (1 - x / highest)) for s, x in enumerate(curve)]
        parts.append(polyline(points, color, 9 - 2.5 * i))
        parts += [
            circle(left + 110 * i, top + height + 24, color),
            text(left + 10 + 110 * i, top + height + 28, f"cp={size}"),
        ]
    return document(left + width + 20, top + height + 44, parts)


def fp8_curves(result: dict) -> str:
    """Draw the mean loss by step of each choice of attention, and next to it the difference from the first choice."""
    left, top, width, height, gap = 60, 44, 360, 180, 90
    first, *others = next(iter(result["curves"].values()))
    colors = dict(zip((first, *others), (INK, "#999999", *COLORS), strict=False))
    parts = [text(left, 18, f"training loss by step, means over the seeds, {result['environment']['device']}")]
    for row, (variant, curves) in enumerate(result["curves"].items()):
        y = top + row * (height + 54)
        apart = {name: [x - base for x, base in zip(curves[name], curves[first], strict=True)] for name in others}
        highest = 1 + int(max(max(curve) for curve in curves.values()))
        parts += _panel(left, y, width, height, curves, colors, f"{variant}: loss", range(highest + 1))
        levels = [level / 100 for level in range(-6, 7, 2)]
        parts += _panel(
            left + width + gap, y, width, height, apart, colors, f"{variant}: loss - loss of {first}", levels
        )
    for i, (name, color) in enumerate(colors.items()):
        x, y = left + 180 * i, top + len(result["curves"]) * (height + 54) - 8
        parts += [circle(x, y, color), text(x + 10, y + 4, name, size=12)]
    return document(left + 2 * width + gap + 20, y + 18, parts)


def _panel(
    left: float,
    top: float,
    width: float,
    height: float,
    curves: dict[str, list[float]],
    colors: dict[str, str],
    title: str,
    levels: Sequence[float],
) -> list[str]:
    """Return a panel with one line for each curve, cut off at the lowest and highest level."""
    low, high = levels[0], levels[-1]
    parts = [text(left, top - 8, title, size=12)]
    parts += scale(left, top, width, height, levels, high, low)
    for name, curve in curves.items():
        clipped = [min(high, max(low, x)) for x in curve]
        places = [left + width * (i + 0.5) / len(curve) for i in range(len(curve))]
        points = [(x, top + height * (high - loss) / (high - low)) for x, loss in zip(places, clipped, strict=True)]
        parts.append(polyline(points, colors[name], 1.5))
    return parts


def ring_beside_peers(results: Sequence[dict]) -> str:
    """Draw the percentage of the ideal by tokens per GPU: forward and backward on eight GPUs, ours and the peers'."""
    kind = ", 32/8 heads of 128, causal"
    rows = [row for row in results if row["row"].endswith(kind) and row["pass"] == "forward + backward"]
    names = [name for name in rows[0]["percent"] if "graph" not in name.lower()]
    colors = dict(zip(names, (*COLORS, MESSAGE), strict=True))
    left, top, height, bar = 50, 34, 220, 34
    group = bar * len(names) + 30
    width = group * len(rows)
    parts = [text(left, 18, "percent of the ideal, forward and backward, eight H200s, 32/8 heads of 128, causal")]
    parts += scale(left, top, width, height, range(0, 101, 20), 100)
    for i, row in enumerate(rows):
        for j, name in enumerate(names):
            x, tall = left + group * i + bar * j + 15, height * row["percent"][name] / 100
            parts.append(rect(x, top + height - tall, bar - 4, tall, colors[name]))
            parts.append(
                text(x + bar / 2 - 2, top + height - tall - 5, f"{row['percent'][name]:.0f}", size=12, anchor="middle")
            )
        tokens = int(row["row"].split()[0]) // 1024
        parts.append(
            text(left + group * (i + 0.5), top + height + 20, f"{tokens}k tokens a GPU", size=12, anchor="middle")
        )
    for i, name in enumerate(names):
        x, y = left + 230 * (i % 3), top + height + 44 + 20 * (i // 3)
        parts += [circle(x, y, colors[name]), text(x + 10, y + 4, name, size=12)]
    return document(left + width + 20, top + height + 80, parts)


def by_length(results: Sequence[dict], direction: str) -> str:
    """Draw the causal kernel speed by length for head_dim 128: ours and the peers', one point per row."""
    rows = [row for row in results if row["row"].startswith("hd128") and row["row"].endswith("causal")]
    rows.sort(key=lambda row: _tokens(row["row"].split()[1]))
    labels = [row["row"].removeprefix("hd128 ").removesuffix(", causal") for row in rows]
    contenders = [who for who in BY_LENGTH if any(who in row["tflops"] for row in rows)]
    left, top, width, height = 70, 30, 620, 260
    highest = 100 * (1 + int(max(row["tflops"].get(who, 0) for row in rows for who in contenders) // 100))
    parts = [text(left, 18, f"TFLOP/s, {direction}, head_dim 128, causal")]
    parts += scale(left, top, width, height, range(0, highest + 1, 100), highest)
    places = [left + width * (i + 0.5) / len(rows) for i in range(len(rows))]
    for x, label in zip(places, labels, strict=True):
        parts.append(text(x, top + height + 18, label, size=11, anchor="middle"))
    for color, who in zip(COLORS, contenders, strict=False):
        points = [(x, row["tflops"][who]) for x, row in zip(places, rows, strict=True) if who in row["tflops"]]
        scaled = [(x, top + height * (1 - value / highest)) for x, value in points]
        parts += [polyline(scaled, color), *(circle(x, y, color) for x, y in scaled)]
    for i, (color, who) in enumerate(zip(COLORS, contenders, strict=False)):
        parts += [circle(left + 150 * i, top + height + 42, color), text(left + 10 + 150 * i, top + height + 46, who)]
    return document(left + width + 20, top + height + 60, parts)


def _tokens(length: str) -> int:
    """Return the number of tokens in the name of a row: "10k" or "6,000"."""
    return int(length[:-1]) * 1024 if length.endswith("k") else int(length.replace(",", ""))


def scale(
    left: float, top: float, width: float, height: float, levels: Sequence[float], high: float, low: float = 0
) -> list[str]:
    """Return horizontal lines at some levels, with their numbers."""
    parts = []
    for level in levels:
        y = top + height * (high - level) / (high - low)
        parts += [line(left, y, left + width, y, "#dddddd"), text(left - 8, y + 4, f"{level:g}", size=12, anchor="end")]
    return parts


def document(width: float, height: float, parts: Iterable[str]) -> str:
    """Return a complete SVG document on a white background."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" font-family="sans-serif">'
    return "\n".join([head, rect(0, 0, width, height, PAPER), *parts, "</svg>", ""])


def rect(x: float, y: float, width: float, height: float, color: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{color}" stroke="{PAPER}"/>'


def polygon(points: Iterable[tuple[float, float]], color: str) -> str:
    return f'<polygon points="{_joined(points)}" fill="{color}" stroke="{PAPER}"/>'


def polyline(points: Iterable[tuple[float, float]], color: str, width: float = 2) -> str:
    return f'<polyline points="{_joined(points)}" fill="none" stroke="{color}" stroke-width="{width:g}"/>'


def circle(x: float, y: float, color: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}"/>'


def line(x: float, y: float, x2: float, y2: float, color: str) -> str:
    return f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}"/>'


def text(x: float, y: float, what: str, color: str = INK, size: int = 14, anchor: str = "start") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"'
    return f'<text {place} fill="{color}" xml:space="preserve">{escape(what)}</text>'


def _joined(points: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


if __name__ == "__main__":
    main()
