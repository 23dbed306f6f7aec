"""The tables of whole jobs: large images, the tile loop, Set5 and start-up; see
``render_results.py``."""

from __future__ import annotations

import math
from collections.abc import Callable

from tables import Rows, figure, table

FIGURES = {
    "cpu_s": "processor seconds",
    "wall_s": "clock seconds",
    "peak_bytes": "peak",
    "high_water_bytes": "high-water mark",
}


def startup(rows: Rows) -> str:
    """Medians of fresh processes."""
    head = ["command", "clock s", "least", "most", "processor s", "runs", "heavy imports"]
    keys = ("wall_median_s", "wall_min_s", "wall_max_s", "cpu_median_s")
    return table(
        head,
        [
            [
                f"`{row['row']}`",
                *(f"{row[key]:.3f}" for key in keys),
                str(row["runs"]),
                ", ".join(row["heavy_imports"]) or "none",
            ]
            for row in rows
        ],
    )


def first_contact(rows: Rows) -> str:
    """Seconds of first and later runs, and how many times those of a plain script."""
    head = ["picture", "first", "later", "plain script", "first / plain", "later / plain", "turns"]
    return table(
        head,
        [
            [
                row["row"],
                *(figure("_s", row.get(f"{way}_cpu_s")) for way in ("first", "later", "plain")),
                *(figure("ratio", row.get(f"{way}_ratio")) for way in ("first", "later")),
                str(row["pairs"]),
            ]
            for row in rows
        ],
    )


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
    head = [
        "image",
        "budget",
        "peak",
        "high-water mark",
        "expected",
        "at most",
        "accuracy",
        "processor seconds",
        "clock seconds",
    ]
    keys = (
        "row",
        "budget",
        "peak_bytes",
        "high_water_bytes",
        "predicted_bytes",
        "upper_bytes",
        "accuracy",
        "cpu_s",
        "wall_s",
    )
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
    cells = [
        [row["row"], *(figure("_db", level) for level in line)]
        for row, line in zip(scored, levels, strict=True)
    ]
    parts = [table(["enlarged by", "mean", *names], cells)]
    tiled = [row for row in rows if "stated_execution_db" in row]
    if tiled:
        head = ["tiles against the whole image", "stated: at least", "actual", "holds"]
        parts.append(
            table(
                head,
                [
                    [
                        row["row"],
                        worst(row["stated_execution_db"], "exact"),
                        worst(row["actual_execution_db"], "no difference"),
                        "yes" if row["statement_holds"] else "**no**",
                    ]
                    for row in tiled
                ],
            )
        )
    return "\n\n".join(parts)


def worst(levels: dict[str, float | None], none: str) -> str:
    """The lowest level over the pictures; ``none`` where no picture has one."""
    known = [level for level in levels.values() if level is not None and math.isfinite(level)]
    return figure("_db", min(known)) if known else none


SHAPES: dict[str, Callable[[Rows], str]] = {
    "startup": startup,
    "first_contact": first_contact,
    "tile_loop": tile_loop,
    "large_images": large_images,
    "set5": set5,
    "large_streamed": large_images,
}
