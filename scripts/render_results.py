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
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import render_attention
import render_denoise
import render_forecast
import render_jobs
import render_memory
import render_streaming
import render_summary
import render_training
import render_variants
import render_video
from tables import Shape, joined, named

from lowtide.core.units import format_bytes

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
TARGETS = (
    "README.md",
    "docs/results.md",
    "docs/concepts/streaming.md",
    "docs/guide/denoiser_memory.md",
    "docs/guide/ldm4ts_memory.md",
    "docs/guide/video_vae_memory.md",
)
NOT_YET = "Not measured yet."

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
    software = ", ".join(f"{name} {version}".strip() for name, version in _software(facts).items())
    done = "computed" if "not verified" in data["about"] else "measured"
    return f"{done} on {_hardware(facts)}; {software}.{elsewhere}"


def environments(files: list[dict[str, Any]]) -> str:
    """Of several result files, whose rows name their processor: all hardware and all versions."""
    hardware: dict[str, None] = {}
    versions: dict[str, dict[str, None]] = defaultdict(dict)
    for data in files:
        for row in data["rows"]:
            facts = data["environment"] | row.get("environment", {})
            hardware[_hardware(facts)] = None
            for name, version in _software(facts).items():
                versions[name][version] = None
    software = [f"{name} {' or '.join(found)}".strip() for name, found in versions.items()]
    return f"Measured on {' and on '.join(hardware)}; {', '.join(software)}."


def _software(facts: dict[str, Any]) -> dict[str, str]:
    """Versions by name; the system's name holds its own."""
    return {facts["system"]: "", "Python": facts["python"], **facts["packages"]}


def _hardware(facts: dict[str, Any]) -> str:
    words = [f"{facts['cpu']}, {facts['cores']} cores"]
    words += [f"{format_bytes(n)} memory"] if (n := facts["memory_bytes"]) else []
    words += [facts["gpu"]] if facts["gpu"] else []
    return ", ".join(words)


def _leaves(facts: dict[str, Any]) -> Iterator[str]:
    """What differs, as words."""
    for name, value in facts.items():
        if isinstance(value, dict):
            yield from _leaves(value)
        elif name.endswith("_bytes"):
            yield f"{format_bytes(value)} {name.removesuffix('_bytes')}"
        else:
            yield str(value) if name == "cpu" else f"{name} {value}"


SHAPES: dict[str, Shape] = {
    **render_jobs.SHAPES,
    **render_attention.SHAPES,
    **render_denoise.SHAPES,
    **render_forecast.SHAPES,
    **render_memory.SHAPES,
    **render_streaming.SHAPES,
    **render_training.SHAPES,
    **render_variants.SHAPES,
    **render_video.SHAPES,
}


def full(name: str) -> str:
    """A result file as tables, with what it is about and where it was measured."""
    data = load(name)
    if data is None or not data["rows"]:
        return NOT_YET
    shape = SHAPES.get(name) or SHAPES[name.removesuffix("_gpu")]
    return joined(data["about"], shape(named(data)), f"This was {environment(data)}")


def summary() -> str:
    """Tables of what was measured, then what was not, then where."""
    names = render_summary.NAMES
    found = {name: data for name in names if (data := load(name)) and data["rows"]}
    parts = render_summary.summary(found)
    if missing := [name for name in names if name not in found]:
        parts.append(f"{NOT_YET[:-1]}: {titles(missing)}.")
    return joined(*parts, environments(list(found.values())))


def titles(names: list[str]) -> str:
    """Names for people."""
    return ", ".join(n.replace("_gpu", " on a GPU").replace("_", " ") for n in names)


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
