"""Write the tables of README.md and of docs from benchmarks/results/*.json.

    python scripts/render_results.py [--check]

A table stands between ``<!-- results:NAME -->`` and ``<!-- /results -->``. NAME is a result file
without its suffix, or ``measured`` for the summary of them all. With ``--check`` nothing is
written; a file whose tables are out of date is named and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import render_attention
import render_jobs
import render_memory
import render_streaming
import render_training
import render_variants
from tables import Cells, Rows, table

from lowtide.core.units import format_bytes

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
TARGETS = ("README.md", "docs/results.md", "docs/concepts/streaming.md")
NOT_YET = "Not measured yet."
SUMMARY = (
    "large_images", "tile_loop", "streaming", "fast_windows", "drct_photograph", "folder_pipeline",
    "set5", "startup", "large_images_gpu", "tile_loop_gpu",
)  # fmt: skip

_BLOCK = re.compile(r"(<!-- results:(\w+) -->\n).*?(<!-- /results -->)", re.DOTALL)


def load(name: str) -> dict[str, Any] | None:
    """One result file's content, or None if it was never measured."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else None


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


SHAPES: dict[str, Callable[[Rows], str]] = {
    **render_jobs.SHAPES, **render_attention.SHAPES, **render_memory.SHAPES,
    **render_streaming.SHAPES, **render_training.SHAPES, **render_variants.SHAPES,
}  # fmt: skip
LINES = {**render_jobs.LINES, **render_streaming.LINES}


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
    return LINES[name.removesuffix("_gpu")](rows, place)


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
