"""The tables of LDM4TS's memory; see ``render_results.py``."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

from render_training import checkpointed
from tables import NONE, Rows, table

from lowtide.core.units import format_bytes


def ldm4ts_memory(rows: Rows) -> str:
    """Estimates and presets for GPUs, then what was measured on the CPU."""
    shapes = {
        "estimates": _estimated,
        "presets": _presets,
        "prediction": _predicted,
        "checkpointing": _checkpointed,
        "sampling": _sampled,
    }
    found = {part: [row for row in rows if row["part"] == part] for part in shapes}
    return "\n\n".join(shapes[part](found[part]) for part in shapes if found[part])


def _estimated(rows: Rows) -> str:
    head = ["backend", "checkpointing", "expected", "at most", "saved, of default"]
    cells = []
    for row in rows:
        lead = [f"`{row['backend']}`", _yes(row["checkpointing"])]
        if "refused" in row:
            cells.append([*lead, f"refused: {row['refused']}", NONE, NONE])
            continue
        gigabytes = (f"{row[f'total_{name}_gb']:.2f} GB" for name in ("estimated", "upper"))
        cells.append([*lead, *gigabytes, f"{row['savings_vs_default_pct']:.0f} %"])
    return (
        f"`estimate_vram_usage` for {rows[0]['batch']} images of 224×224 in bf16 on an RTX 3060,"
        f" predicted and not measured:\n\n{table(head, cells)}"
    )


def _presets(rows: Rows) -> str:
    head = ["GPU", "free for training", "checkpointing", "largest batch", "expected", "at most"]
    cells = [
        [
            row["card"],
            format_bytes(row["budget_bytes"]),
            row["checkpointing"],
            f"{row['batch']:,}",
            format_bytes(row["predicted_bytes"]),
            format_bytes(row["upper_bytes"]),
        ]
        for row in rows
    ]
    return (
        "The largest batch, of powers of two, of images of 224×224 in fp32 with an EMA whose bound"
        f" fits, predicted and not measured:\n\n{table(head, cells)}"
    )


def _predicted(rows: Rows) -> str:
    head = [
        "images",
        "batch",
        "backend",
        "checkpointing",
        "expected",
        "at most",
        "measured",
        "error",
        "tensors alone: expected",
        "measured",
        "error",
    ]
    cells = [
        [
            f"{row['side']}×{row['side']}",
            str(row["batch"]),
            f"`{row['backend']}`",
            row["checkpointing"],
            *(format_bytes(row[f"{name}_bytes"]) for name in ("predicted", "upper", "peak")),
            f"{row['error_percent']:+.1f} %",
            format_bytes(row["predicted_tensor_bytes"]),
            format_bytes(row["tensor_bytes"]),
            f"{row['tensor_error_percent']:+.1f} %",
        ]
        for row in rows
    ]
    within = sum(row["within_bound"] for row in rows)
    return (
        "Training steps on the CPU, as `lowtide train forecast` predicts them and as its trainer"
        f" takes them:\n\n{table(head, cells)}\n\n"
        f"The median error is {_median(rows, 'error_percent'):.1f} % of resident memory and"
        f" {_median(rows, 'tensor_error_percent'):.1f} % of tensors; {within} of {len(rows)} peaks"
        " are within the bound. On GPUs: not measured."
    )


def _checkpointed(rows: Rows) -> str:
    return f"A step with and without checkpointing, on the CPU:\n\n{checkpointed(rows)}"


def _sampled(rows: Rows) -> str:
    counts = list(rows[0]["peak_bytes"])
    head = ["images", *(f"{count} samples" for count in counts), "from fewest to most"]
    cells = [
        [
            row["row"].partition(", ")[2].replace(" px", f"×{row['row'].split()[1]}"),
            *(format_bytes(row["peak_bytes"][count]) for count in counts),
            f"{row['growth_percent']:+.1f} %",
        ]
        for row in rows
    ]
    return f"Drawing samples of a window, less the samples themselves:\n\n{table(head, cells)}"


def _yes(value: Any) -> str:
    return "yes" if value else "no"


def _median(rows: Rows, name: str) -> float:
    return median(abs(row[name]) for row in rows)


SHAPES: dict[str, Callable[[Rows], str]] = {"ldm4ts_memory": ldm4ts_memory}
