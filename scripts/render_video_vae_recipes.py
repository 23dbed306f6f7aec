"""The tables of recipes for video autoencoders; see ``render_results.py``."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

from tables import NONE, Rows, figure, table

_PHASES = ("encode", "model", "decode", "write")


def video_vae_recipes(rows: Rows) -> str:
    """Each recipe next to the plain decode, then the four phases of a restoration."""
    recipes = [row for row in rows if row["part"] == "recipe"]
    phases = [row for row in rows if row["part"] == "phases"]
    return "\n\n".join([*([_recipes(recipes)] if recipes else []), *map(_four, phases)])


def _recipes(rows: Rows) -> str:
    plain = rows[0]
    head = ["decode", "peak", "of plain's", "processor seconds", "of plain's", "largest difference"]
    head += ["PSNR", "SSIM", "first call"]
    return table(head, [_cells(row, plain) for row in rows])


def _cells(row: dict[str, Any], plain: dict[str, Any]) -> list[str]:
    lead = [row["row"], figure("peak_bytes", row["peak_bytes"])]
    lead.append(f"{row['peak_bytes'] / plain['peak_bytes']:.0%}")
    if "cpu_s" not in row:
        return [*lead, *(NONE for _ in range(6))]
    ratio = median(one / other for one, other in zip(row["cpu_s"], plain["cpu_s"], strict=True))
    psnr = row["psnr_db"]
    return [
        *lead,
        f"{median(row['cpu_s']):.2f}",
        f"{ratio:.2f}×",
        f"{row['max_abs_error']:.1e} of {row['range']:.2g}",
        "equal" if psnr is None else f"{psnr:.1f} dB",
        f"{row['ssim']:.4f}",
        f"{row['first_call_cpu_s']:.1f}",
    ]


def _four(row: dict[str, Any]) -> str:
    seconds = ", ".join(f"{name} {row[f'{name}_s']:.3f}" for name in _PHASES)
    return (
        f"Four phases of {row['frames']} frames with a small random network between them, in"
        f" processor seconds: {seconds}, together {row['fps']} frames a second."
    )


SHAPES: dict[str, Callable[[Rows], str]] = {"video_vae_recipes": video_vae_recipes}
