"""The tables of video autoencoders; see ``render_results.py``."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

from tables import NONE, Rows, figure, table

_PLAIN = "plain, sliced"


def video_vae(rows: Rows) -> str:
    """Each way next to the plain decode of the same clip, then memory over the length."""
    parts = {row["part"]: [one for one in rows if one["part"] == row["part"]] for row in rows}
    shapes = {"decode": _decodes, "length": _lengths}
    return "\n\n".join(shape(parts[name]) for name, shape in shapes.items() if name in parts)


def _decodes(rows: Rows) -> str:
    head = ["decode", "budget", "peak", "of plain", "planned", "state moved", "processor seconds"]
    head += ["to plain", "first call", "largest difference", "difference"]
    cells, said = [], []
    for row in rows:
        plain = next(one for one in rows if one["way"] == _PLAIN and _clip(one) == _clip(row))
        cells.append(
            [
                row["row"],
                figure("budget_bytes", row["budget_bytes"] or None),
                figure("peak_bytes", row["peak_bytes"]),
                f"{row['peak_bytes'] / plain['peak_bytes']:.0%}",
                _planned(row),
                figure("moved_bytes", row.get("moved_bytes")),
                *_times(row, plain),
            ]
        )
        if "fp64_difference" in row:
            said.append(
                f"{row['row']} differs from the same in fp64 by up to {row['fp64_difference']:.1e}."
            )
    return "\n\n".join([table(head, cells), *said])


def _clip(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["model"], row["width"], row["frames"], row["side"]


def _planned(row: dict[str, Any]) -> str:
    if "predicted_bytes" not in row:
        return NONE
    off = row["predicted_bytes"] / row["peak_bytes"] - 1
    return f"{figure('predicted_bytes', row['predicted_bytes'])} ({off:+.1%})"


def _times(row: dict[str, Any], plain: dict[str, Any]) -> list[str]:
    """Processor seconds, their ratio to the plain ones, and the differences of the result."""
    if "cpu_s" not in row:
        return [NONE] * 5
    seconds = median(row["cpu_s"])
    same = row["max_abs_error"] == 0
    return [
        f"{seconds:.1f}",
        f"{seconds / median(plain['cpu_s']):.2f}",
        f"{row['first_call_cpu_s']:.0f}",
        "none" if same else f"{row['max_abs_error']:.1e} of {row['range']:.2f}",
        NONE if same else f"{row['psnr_db']:.0f} dB",
    ]


def _lengths(rows: Rows) -> str:
    head = ["frames", "peak", "result", "peak less result", "planned", "plan"]
    cells = [
        [
            row["row"],
            figure("peak_bytes", row["peak_bytes"]),
            figure("result_bytes", row["result_bytes"]),
            figure("peak_bytes", row["peak_bytes"] - row["result_bytes"]),
            _planned(row),
            row["plan"].split(";")[0],
        ]
        for row in rows
    ]
    return table(head, cells)


SHAPES: dict[str, Callable[[Rows], str]] = {"video_vae": video_vae}
