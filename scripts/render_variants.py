"""The tables of the ParagonSR2 family, for ``render_results.py``."""

from __future__ import annotations

from statistics import median

from tables import Rows, spread, table

from lowtide.core.units import format_bytes

_NONE = "–"
_SCALES = (1, 2, 3, 4, 8)


def paragonsr2_variants(rows: Rows) -> str:
    """A table for each part that was measured, its lines from the smallest network on, in whatever
    order they were measured."""
    models = [*dict.fromkeys(row["model"] for row in rows)]
    rows = sorted(rows, key=lambda row: (models.index(row["model"]), row["scale"]))
    parts = [(shape, [row for row in rows if row["part"] == name]) for name, shape in PARTS.items()]
    return "\n\n".join(shape(part) for shape, part in parts if part)


def _sizes(rows: Rows) -> str:
    """Part a: weights and work, a line for each network and attention."""
    lines: dict[tuple[str, str], dict[int, str]] = {}
    for row in rows:
        for attention in ("window", "none"):
            if one := row.get(attention):
                cell = f"{one['parameters']:,} / {one['flops_per_pixel']:,}"
                lines.setdefault((row["model"], attention), {})[row["scale"]] = cell
    head = ["weights / FLOPs per input pixel", "attention", *(f"×{one}" for one in _SCALES)]
    return table(
        head,
        [
            [*names, *(cells.get(scale, _NONE) for scale in _SCALES)]
            for names, cells in lines.items()
        ],
    )


def _attention(rows: Rows) -> str:
    """Part b: peaks and times with attention and without."""
    peaks = {
        (row["model"], row["scale"], row["attention"]): row for row in rows if "cpu_s" not in row
    }
    lines = []
    for row in rows:
        if "cpu_s" not in row:
            continue
        found = [peaks.get((row["model"], row["scale"], way)) for way in ("window", "none")]
        seconds = [row["cpu_s"].get(way) for way in ("window", "none")]
        lines.append(
            [
                f"{row['model']} ×{row['scale']}",
                *(format_bytes(one["peak_bytes"]) if one else _NONE for one in found),
                *(f"{median(one):.3f} s" if one else _NONE for one in seconds),
                _ratio(row["ratio"].get("window")),
            ]
        )
    head = [
        "128×128 pixels",
        "peak with attention",
        "without",
        "processor time with",
        "without",
        "with, of without (range)",
    ]
    return table(head, lines)


def _bands(rows: Rows) -> str:
    """Part c: the whole and the streamed run of one picture."""
    named = {row["row"]: row for row in rows}
    lines = []
    for name, row in named.items():
        title, _, what = name.rpartition(", ")
        if what != "times":
            continue
        whole, streamed = (named[f"{title}, {way}"] for way in ("whole", "streamed"))
        share = f"{streamed['peak_bytes'] / whole['peak_bytes']:.0%}"
        share += ", the heap keeping small blocks" if "allocator" in streamed else ""
        lines.append(
            [
                title,
                format_bytes(whole["peak_bytes"]),
                f"{format_bytes(streamed['peak_bytes'])} ({share})",
                *(f"{median(row['cpu_s'][way]):.1f} s" for way in ("whole", "streamed")),
                _ratio(row["ratio"]["streamed"]),
                f"{row['max_abs_error']:.1e}",
            ]
        )
    head = [
        "in bands",
        "peak of the whole",
        "streamed",
        "processor time of the whole",
        "streamed",
        "streamed, of the whole (range)",
        "largest difference",
    ]
    return table(head, lines)


def _jobs(rows: Rows) -> str:
    """Part d: files under a budget."""
    head = ["photograph, file to file", "budget", "peak", "expected", "within", "plan"]
    return table(
        head,
        [
            [
                f"{row['model']} ×{row['scale']}, {row['side']}²",
                *(format_bytes(row[f"{name}_bytes"]) for name in ("budget", "peak", "predicted")),
                "yes" if row["within_budget"] else "no",
                row["plan"],
            ]
            for row in rows
        ],
    )


def _predicted(rows: Rows) -> str:
    """Part e: predicted memory on a GPU, and the announced one."""
    lines: dict[tuple[str, int], list[str]] = {}
    for row in rows:
        claim = "–"
        if "claimed_bytes" in row:
            low, high = row["claimed_bytes"]
            claim = f"{low / 2**30:.1f} to {high / 2**30:.1f}"
            claim += "" if row["within_claim"] else ", exceeded"
        cell = f"{row['predicted_bytes'] / 2**30:.2f} ({claim})"
        lines.setdefault((row["model"], row["scale"]), []).append(cell)
    head = [
        "on rtx3060-12gb, GiB expected (and announced)",
        "128×128",
        "512×512",
        "1024×1024",
        "training, 16 of 64 px",
    ]
    return table(
        head,
        [
            [f"{model} ×{scale}", *cells, *[_NONE] * (4 - len(cells))]
            for (model, scale), cells in lines.items()
        ],
    )


def _ratio(ratio: dict[str, float] | None) -> str:
    return _NONE if ratio is None else spread(ratio)


PARTS = {"a": _sizes, "b": _attention, "c": _bands, "d": _jobs, "e": _predicted}
SHAPES = {"paragonsr2_variants": paragonsr2_variants}
