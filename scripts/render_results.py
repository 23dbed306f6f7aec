"""Write the tables of README.md and of docs from benchmarks/results/*.json.

    python scripts/render_results.py [--check]

A table stands between ``<!-- results:NAME -->`` and ``<!-- /results -->``. NAME is a result file
without its suffix, or ``measured`` for the summary of them all. With ``--check`` nothing is
written; a file whose tables are out of date is named and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import render_attention
import render_memory
import render_streaming
import render_training
import render_variants
from render_memory import table

from lowtide.core.units import format_bytes

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
TARGETS = ("README.md", "docs/results.md", "docs/concepts/streaming.md")
NOT_YET = "Not measured yet."
NONE = "–"
SUMMARY = (
    "large_images", "tile_loop", "streaming", "fast_windows", "drct_photograph", "folder_pipeline",
    "set5", "startup", "large_images_gpu", "tile_loop_gpu",
)  # fmt: skip
FIGURES = {
    "cpu_s": "processor seconds", "wall_s": "clock seconds",
    "peak_bytes": "peak", "high_water_bytes": "high-water mark",
}  # fmt: skip

_BLOCK = re.compile(r"(<!-- results:(\w+) -->\n).*?(<!-- /results -->)", re.DOTALL)

Rows = list[dict[str, Any]]
Cells = list[list[str]]


def load(name: str) -> dict[str, Any] | None:
    """One result file's content, or None if it was never measured."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else None


def figure(name: str, value: Any) -> str:
    """A value in the unit that its name tells; a median with its range if there is one."""
    if value is None or isinstance(value, str):
        return value or NONE
    if isinstance(value, dict):
        median, low, high = (figure(name, value[key]) for key in ("median", "min", "max"))
        return f"{median} ({low} to {high})"
    if name.endswith("_bytes"):
        return format_bytes(value)
    if name.endswith("_db"):
        return f"{value:.2f} dB"
    return f"{value:.3f}" if name == "ratio" or value < 1 else f"{value:.1f}"


def environment(data: dict[str, Any]) -> str:
    """Hardware and versions in one sentence, and what differed for rows measured elsewhere."""
    facts = data["environment"]
    others = Counter(json.dumps(row["environment"]) for row in data["rows"] if "environment" in row)
    elsewhere = "".join(
        f" {count} of {len(data['rows'])} rows elsewhere: {', '.join(_leaves(json.loads(what)))}."
        for what, count in others.items()
    )
    hardware = [f"{facts['cpu']}, {facts['cores']} cores"]
    hardware += [f"{format_bytes(n)} memory"] if (n := facts["memory_bytes"]) else []
    hardware += [facts["gpu"]] if facts["gpu"] else []
    software = [facts["system"], f"Python {facts['python']}"]
    software += [f"{name} {version}" for name, version in facts["packages"].items()]
    return f"measured on {', '.join(hardware)}; {', '.join(software)}.{elsewhere}"


def _leaves(facts: dict[str, Any]) -> Iterator[str]:
    """What differs, as words."""
    for name, value in facts.items():
        if isinstance(value, dict):
            yield from _leaves(value)
        elif name.endswith("_bytes"):
            yield f"{format_bytes(value)} {name.removesuffix('_bytes')}"
        else:
            yield str(value) if name == "cpu" else f"{name} {value}"


def startup(rows: Rows) -> str:
    """Medians of fresh processes."""
    head = ["command", "clock s", "least", "most", "processor s", "runs", "heavy imports"]
    keys = ("wall_median_s", "wall_min_s", "wall_max_s", "cpu_median_s")
    return table(head, [
        [f"`{row['row']}`", *(f"{row[key]:.3f}" for key in keys), str(row["runs"]),
         ", ".join(row["heavy_imports"]) or "none"]
        for row in rows
    ])  # fmt: skip


def tile_loop(rows: Rows) -> str:
    """Both sides, then each comparison of them."""
    sides = [row for row in rows if "cpu_s" in row]
    cells = [[figure(key, row.get(key)) for key in ("row", *FIGURES, "plan")] for row in sides]
    parts = [table(["run", *FIGURES.values(), "plan"], cells)]
    for row in (row for row in rows if row["row"].startswith("comparison")):
        ratios = {title: row.get(f"{key}_ratio") for key, title in FIGURES.items()}
        cells = [[title, figure("ratio", value)] for title, value in ratios.items()]
        if (largest := row.get("largest_difference_of_255")) is not None:
            cells.append(["largest difference of the two files, of 255", str(largest)])
        parts.append(table([f"{row['row']}: Lowtide divided by the loop", "median (range)"], cells))
    return "\n\n".join(parts)


def large_images(rows: Rows) -> str:
    """One row for each size; the ratio is that of the larger to the smaller image."""
    head = ["image", "budget", "peak", "high-water mark", "expected", "at most", "accuracy",
            "processor seconds", "clock seconds"]  # fmt: skip
    keys = ("row", "budget", "peak_bytes", "high_water_bytes", "predicted_bytes", "upper_bytes",
            "accuracy", "cpu_s", "wall_s")  # fmt: skip
    sizes = [row for row in rows if "width" in row]
    parts = [table(head, [[figure(key, row.get(key)) for key in keys] for row in sizes])]
    for row in (row for row in rows if row["row"].startswith("ratio")):
        cells = [[FIGURES[key], figure("ratio", row[key])] for key in FIGURES if key in row]
        head = "larger image divided by the smaller" + row["row"].removeprefix("ratio")
        parts.append(table([head, "ratio"], cells))
    return "\n\n".join(parts)


def set5(rows: Rows) -> str:
    """PSNR-Y of each picture, then what tiling was stated to cost and did cost."""
    scored = [row for row in rows if "pictures_db" in row]
    names = list(scored[0]["pictures_db"]) if scored else []
    levels = [[row["mean_db"], *row["pictures_db"].values()] for row in scored]
    cells = [[row["row"], *(figure("_db", level) for level in line)]
             for row, line in zip(scored, levels, strict=True)]  # fmt: skip
    parts = [table(["enlarged by", "mean", *names], cells)]
    tiled = [row for row in rows if "stated_execution_db" in row]
    if tiled:
        head = ["tiles against the whole picture", "stated: at least", "actual", "holds"]
        parts.append(table(head, [
            [row["row"], worst(row["stated_execution_db"], "exact"),
             worst(row["actual_execution_db"], "no difference"),
             "yes" if row["statement_holds"] else "**no**"]
            for row in tiled
        ]))  # fmt: skip
    return "\n\n".join(parts)


def worst(levels: dict[str, float | None], none: str) -> str:
    """The lowest level over the pictures; ``none`` where no picture has one."""
    known = [level for level in levels.values() if level is not None and math.isfinite(level)]
    return figure("_db", min(known)) if known else none


SHAPES: dict[str, Callable[[Rows], str]] = {
    "startup": startup, "tile_loop": tile_loop, "large_images": large_images, "set5": set5,
    "large_streamed": large_images,
    **render_attention.SHAPES, **render_memory.SHAPES, **render_streaming.SHAPES,
    **render_training.SHAPES, **render_variants.SHAPES,
}  # fmt: skip


def full(name: str) -> str:
    """A result file as tables, with what it is about and where it was measured."""
    data = load(name)
    if data is None or not data["rows"]:
        return NOT_YET
    shape = SHAPES.get(name) or SHAPES[name.removesuffix("_gpu")]
    usual = data["environment"]["cpu"]
    rows = [
        {"processor": row.get("environment", {}).get("cpu", usual), **row} for row in data["rows"]
    ]
    return "\n\n".join([data["about"], shape(rows), f"This was {environment(data)}"])


def summary() -> str:
    """One line for each task that was measured, then what was not, then where."""
    found = {name: data for name in SUMMARY if (data := load(name)) and data["rows"]}
    lines = [line for name, data in found.items() for line in summary_lines(name, data["rows"])]
    head = ["task", "budget", "measured peak", "accuracy", "processor seconds", "against"]
    parts = [table(head, lines)] if lines else []
    if missing := [name for name in SUMMARY if name not in found]:
        parts.append(f"{NOT_YET[:-1]}: {titles(missing)}.")
    places: dict[str, list[str]] = {}
    for name, data in found.items():
        places.setdefault(environment(data), []).append(name)
    parts += [f"{titles(names)}: {place}" for place, names in places.items()]
    return "\n\n".join(parts)


def titles(names: list[str]) -> str:
    """Names for people."""
    return ", ".join(n.replace("_gpu", " on a GPU").replace("_", " ") for n in names)


def summary_lines(name: str, rows: Rows) -> Cells:
    """The summary's lines about one result file."""
    place = ", on a GPU" if name.endswith("_gpu") else ""
    by_name = {row["row"]: row for row in rows}
    match name.removesuffix("_gpu"):
        case "large_images":
            sizes = [row for row in rows if "width" in row]
            grown = figure("ratio", by_name.get("ratio", {}).get("peak_bytes"))
            keys = ("budget", "peak_bytes", "accuracy", "cpu_s")
            return [
                [f"{row['row']} enlarged ×2{place}", *(figure(key, row[key]) for key in keys),
                 NONE if row is sizes[0] else f"{grown} of the smaller image's peak"]
                for row in sizes
            ]  # fmt: skip
        case "tile_loop" if {"lowtide", "comparison"} <= by_name.keys():
            return [loop_line(by_name["lowtide"], by_name["comparison"], place)]
        case "streaming":
            return render_streaming.streamed_lines(rows)
        case "fast_windows":
            return render_streaming.fast_lines(rows)
        case "drct_photograph":
            return render_streaming.photograph_lines(rows)
        case "folder_pipeline":
            return render_streaming.folder_lines(rows)
        case "set5":
            return [
                [f"Set5 ×{row['scale']} with {row['row']}", NONE, NONE,
                 f"PSNR-Y {figure('_db', row['mean_db'])}", NONE,
                 ", ".join(f"{other['row']}: {figure('_db', other['mean_db'])}" for other in rows
                           if other is not row and other["scale"] == row["scale"]
                           and "pictures_db" in other and (
                               not other["row"].startswith("lowtide")
                               or other["row"] == f"{row['row']}, self-ensemble"))]
                for row in rows if "parameters" in row and row["row"].startswith("lowtide")
            ]  # fmt: skip
        case "startup":
            clock = f"{rows[0]['wall_median_s']:.2f} s by the clock"
            start = f"{rows[0]['cpu_median_s']:.2f}"
            return [[f"`{rows[0]['row']}`", NONE, NONE, NONE, start, clock]]
    return []


def loop_line(own: dict[str, Any], compared: dict[str, Any], place: str) -> list[str]:
    """Lowtide beside the tile loop; ratios above 1 are losses and stand there, too."""
    # The processor waits while a GPU works, so that only the clock tells its time.
    key, kind = ("wall_s", "clock") if place else ("cpu_s", "processor")
    time, memory = (figure("ratio", compared[f"{name}_ratio"]) for name in (key, "peak_bytes"))
    return [
        f"2 megapixels enlarged ×2{place}", "auto",
        figure("peak_bytes", own["peak_bytes"]["median"]),
        f"differs from the loop by at most {compared['largest_difference_of_255']} of 255",
        figure("cpu_s", own["cpu_s"]["median"]),
        f"the usual tile loop: {time} of its {kind} time, {memory} of its peak",
    ]  # fmt: skip


def render(text: str) -> str:
    """``text`` with every block filled in; KeyError for a block of no known name."""

    def fill(match: re.Match[str]) -> str:
        body = summary() if match[2] == "measured" else full(match[2])
        return f"{match[1]}\n{body}\n\n{match[3]}"

    return _BLOCK.sub(fill, text)


def main() -> int:
    """Write, or check, every target."""
    parser = argparse.ArgumentParser(description="Tables from benchmarks/results.")
    parser.add_argument("--check", action="store_true", help="only say which files are stale")
    check, stale = parser.parse_args().check, False
    for name in TARGETS:
        before = (ROOT / name).read_text(encoding="utf-8")
        after = render(before)
        if before == after:
            continue
        stale = True
        print(f"{name}: {'out of date; run scripts/render_results.py' if check else 'written'}")
        if not check:
            (ROOT / name).write_text(after, encoding="utf-8")
    return int(check and stale)


if __name__ == "__main__":
    sys.exit(main())
