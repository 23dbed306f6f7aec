"""The tables of the denoiser; see ``render_results.py``."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from tables import NONE, Rows, spread, table

from lowtide.core.units import format_bytes


def attention(rows: Rows) -> str:
    """Modules alone, then training steps of networks with them."""
    parts = []
    for row in (row for row in rows if row["part"] == "modules"):
        cells = [
            [
                name,
                format_bytes(one["activations_bytes"]),
                f"{median(one['cpu_s']):.3f}",
                spread(one["ratio"]),
            ]
            for name, one in row["ways"].items()
        ]
        head = ["one module", "peak", "processor seconds", "of linear's (range)"]
        parts.append(table(head, cells))
    head = ["network with", "checkpointing", "peak", "saved", "processor seconds", "of none's"]
    cells = [
        [
            f"{row['row'].removeprefix('networks, ')} attention",
            way,
            format_bytes(one["activations_bytes"]),
            f"{one['saved_percent']:.0f} %",
            f"{median(one['cpu_s']):.2f}",
            spread(one["ratio"]),
        ]
        for row in rows
        if row["part"] == "networks"
        for way, one in row["ways"].items()
    ]
    return "\n\n".join([*parts, table(head, cells)] if cells else parts)


def steps(rows: Rows) -> str:
    """PSNR, time and repeatability by scheduler and number of steps."""
    head = ["scheduler", "steps", "PSNR", "processor seconds", "runs agree", "seeds differ by"]
    cells = [
        [
            "any" if row["steps"] == 1 else f"`{row['scheduler']}`",
            str(row["steps"]),
            f"{row['psnr_db']:.2f} dB",
            f"{row['cpu_s']:.1f}",
            "in every bit" if row["equal_bits"] else "no",
            f"{row['seed_deviation']:.2f} of 255" if row["seed_deviation"] else NONE,
        ]
        for row in rows
    ]
    return table(head, cells)


SHAPES: dict[str, Callable[[Rows], str]] = {
    "denoise_attention": attention,
    "denoise_steps": steps,
}
