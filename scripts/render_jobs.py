"""The tables of whole jobs: large images, the tile loop, Set5 and start-up; see
``render_results.py``."""

from __future__ import annotations

import math

from tables import Rows, figure, joined, table, tabled

FIGURES = {
    "cpu_s": "processor seconds",
    "wall_s": "clock seconds",
    "peak_bytes": "peak",
    "high_water_bytes": "high-water mark",
}


def startup(rows: Rows) -> str:
    """Medians of fresh processes."""
    return tabled(
        rows,
        "command | clock s | least | most | processor s | runs | heavy imports",
        "`{row}` | {wall_median_s:.3f} | {wall_min_s:.3f} | {wall_max_s:.3f} | {cpu_median_s:.3f}"
        " | {runs} | {heavy}",
        heavy=lambda row: ", ".join(row["heavy_imports"]) or "none",
    )


def first_contact(rows: Rows) -> str:
    """Seconds of first and later runs, and how many times those of a plain script."""
    ways = ("first", "later", "plain")
    return tabled(
        rows,
        "picture | first | later | plain script | first / plain | later / plain | turns",
        "{row} | {seconds} | {first_ratio?:spread.3f} | {later_ratio?:spread.3f} | {pairs}",
        seconds=lambda row: " | ".join(figure("_s", row.get(f"{way}_cpu_s")) for way in ways),
    )


def tile_loop(rows: Rows) -> str:
    """Both sides, then each comparison of them."""
    parts = [
        table(
            " | ".join(["run", *FIGURES.values(), "plan"]),
            [_figures(row, "row", *FIGURES, "plan") for row in rows if "cpu_s" in row],
        )
    ]
    for row in (row for row in rows if row["row"].startswith("comparison")):
        lines = [f"{title} | {figure('ratio', row.get(f'{key}_ratio'))}" for key, title in _TITLES]
        if (largest := row.get("largest_difference_of_255")) is not None:
            lines.append(f"largest difference of the two files, of 255 | {largest}")
        parts.append(table(f"{row['row']}: Lowtide divided by the loop | median (range)", lines))
    return joined(*parts)


_TITLES = FIGURES.items()


def large_images(rows: Rows) -> str:
    """One row for each size; the ratio is that of the larger to the smaller image."""
    memory = ("peak_bytes", "high_water_bytes", "predicted_bytes", "upper_bytes")
    keys = ("row", "budget", *memory, "accuracy", "cpu_s", "wall_s")
    parts = [
        table(
            "image | budget | peak | high-water mark | expected | at most | accuracy"
            " | processor seconds | clock seconds",
            [_figures(row, *keys) for row in rows if "width" in row],
        )
    ]
    for row in (row for row in rows if row["row"].startswith("ratio")):
        lines = [f"{title} | {figure('ratio', row[key])}" for key, title in _TITLES if key in row]
        head = "larger image divided by the smaller" + row["row"].removeprefix("ratio")
        parts.append(table(f"{head} | ratio", lines))
    return joined(*parts)


def _figures(row: dict, *keys: str) -> str:
    return " | ".join(figure(key, row.get(key)) for key in keys)


def set5(rows: Rows) -> str:
    """PSNR-Y of each picture, then what tiling was stated to cost and did cost."""
    scored = [row for row in rows if "pictures_db" in row]
    names = list(scored[0]["pictures_db"]) if scored else []
    scores = tabled(
        scored,
        " | ".join(["enlarged by", "mean", *names]),
        "{row} | {mean_db:.2f dB} | {each}",
        each=lambda row: " | ".join(figure("_db", one) for one in row["pictures_db"].values()),
    )
    tiled = tabled(
        [row for row in rows if "stated_execution_db" in row],
        "tiles against the whole image | stated: at least | actual | holds",
        "{row} | {stated} | {actual} | {statement_holds:yes!}",
        stated=lambda row: worst(row["stated_execution_db"], "exact"),
        actual=lambda row: worst(row["actual_execution_db"], "no difference"),
    )
    return joined(scores, tiled)


def upscale_pictures(rows: Rows) -> str:
    """Means over the pictures of each kind, and the picture that gains least over cubic."""
    kinds = dict.fromkeys(row["kind"] for row in rows)
    lines = []
    for kind in kinds:
        own = [row for row in rows if row["kind"] == kind]
        gains = [row["lowtide_db"] - row["cubic_db"] for row in own]
        means = [
            sum(row[f"{way}_db"] for row in own) / len(own) for way in ("cubic", "plain", "lowtide")
        ]
        models = ", ".join(dict.fromkeys(f"`{row['model']}`" for row in own))
        cells = *(figure("_db", mean) for mean in means), f"{min(gains):+.2f} dB", models
        lines.append(" | ".join([kind, *cells]))
    head = "pictures | cubic | the small model | chosen | least above cubic | chosen models"
    return table(head, lines)


def worst(levels: dict[str, float | None], none: str) -> str:
    """The lowest level over the pictures; ``none`` where no picture has one."""
    known = [level for level in levels.values() if level is not None and math.isfinite(level)]
    return figure("_db", min(known)) if known else none


SHAPES = {
    "startup": startup,
    "first_contact": first_contact,
    "tile_loop": tile_loop,
    "large_images": large_images,
    "set5": set5,
    "upscale_pictures": upscale_pictures,
    "large_streamed": large_images,
}
