"""The table of streamed models, for ``render_results.py``."""

from __future__ import annotations

from typing import Any

from render_memory import table

from lowtide.core.units import format_bytes

Rows = list[dict[str, Any]]


def streaming(rows: Rows) -> str:
    """A line for each model, size and way."""
    head = ["model and size", "way", "peak", "of the whole's", "processor s",
            "of the whole's (range)", "largest difference", "PSNR"]  # fmt: skip
    return table(head, [
        [f"{row['model']}, {row['height']}×{row['width']}", row["way"],
         format_bytes(row["peak_bytes"]), f"{row['share_of_peak']:.0%}",
         f"{sorted(row['cpu_s'])[len(row['cpu_s']) // 2]:.1f}",
         "{median:.2f} ({min:.2f} to {max:.2f})".format(**row["ratio"]),
         f"{row['max_abs_error']:.1e}",
         "–" if row["psnr_db"] is None else f"{row['psnr_db']:.1f} dB"]
        for row in rows
    ])  # fmt: skip


SHAPES = {"streaming": streaming}
