"""The summary in README.md: Lowtide's cost against that of alternatives; see
``render_results.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tables import Row, Rows, figure, filled, named, table

Results = dict[str, dict[str, Any]]
# Lines of a table, of a result file's rows and of where they were measured.
Lines = Callable[[Rows, str], list[str]]

# With what follows such a name in a result file, it was measured on a GPU.
GPU = "_gpu"


def summary(found: Results) -> list[str]:
    """A table for each question that a newcomer has, of the files that there are."""
    tables = (
        table(head, (line for name, lines in sides for line in _of(found, name, lines)))
        for head, sides in TABLES.items()
    )
    return [*filter(None, tables), *startup(found)]


def _of(found: Results, name: str, lines: Lines) -> list[str]:
    """What one result file has to say, if there is one."""
    if name not in found:
        return []
    rows = [{**row, "processor": processor(row)} for row in named(found[name])]
    return lines(rows, ", on a GPU" if name.endswith(GPU) else "")


def processor(row: Row) -> str:
    """Its name without the marks."""
    return row["processor"].replace("(R)", "").removesuffix(" Processor")


def large_images(rows: Rows, place: str) -> list[str]:
    """Each size, by the way that the plan chose or by bands."""
    keys = ("budget", "peak_bytes", "cpu_s", "accuracy")
    return [
        " | ".join(
            [f"{row['row']}{place}", *(figure(key, row[key]) for key in keys), row["processor"]]
        )
        for row in rows
        if "width" in row and row.get("way", "streamed") == "streamed"
    ]


def tile_loop(rows: Rows, place: str) -> list[str]:
    """Lowtide against the tile loop."""
    compared = [row for row in rows if row["row"] == "comparison"]
    # The processor waits while a GPU works, so that only wall time shows its time.
    time = "{wall_s_ratio:spread} of its clock time" if place else "{cpu_s_ratio:spread}"
    return [
        filled(
            row,
            f"2 megapixels enlarged ×2{place} | the usual tile loop | {time}"
            " | {peak_bytes_ratio[median]:.2f} | {largest_difference_of_255} of 255 | {processor}",
        )
        for row in compared
    ]


def photograph(rows: Rows, place: str) -> list[str]:
    """Lowtide beside each other way; the file tells the others' parts of Lowtide, and how far all
    are from the whole run."""
    ways = {row["row"]: row for row in rows if "ratio" in row}
    if (own := ways.pop("Lowtide", None)) is None:
        return []
    other = {"median": "median", "min": "max", "max": "min"}
    return [
        filled(
            row,
            f"512×384 through DRCT ×4, file to file{place} | {{row}} | {{ratio:spread}}"
            " | {share:.2f} | {largest_difference_of_255} of 255 (from the whole; Lowtide's:"
            f" {own['largest_difference_of_255']}) | {{processor}}",
            ratio=lambda row: {name: 1 / row["ratio"][of] for name, of in other.items()},
            share=lambda row: 1 / row["share_of_peak"],
        )
        for row in ways.values()
    ]


# What a run takes of the other's time and peak, how far it is from it, and where.
_PARTS = "{ratio:spread} | {share_of_peak:.2f} | {max_abs_error:.1e} | {processor}"


def streamed(rows: Rows, place: str) -> list[str]:
    """Each model's run with pages in memory, at its largest size, in fp32; in bf16 two runs differ
    by what the type rounds, which takes more words."""
    done = [
        row
        for row in rows
        if "cpu_s" in row and row["way"].endswith("pages in memory") and "bf16" not in row["model"]
    ]
    largest = {row["model"]: row for row in sorted(done, key=lambda row: row["height"])}
    template = "{model} {height}×{width}, streamed in {budget_bytes:bytes}"
    return [
        filled(row, f"{template}{place} | the whole run | {_PARTS}") for row in largest.values()
    ]


def fast_windows(rows: Rows, place: str) -> list[str]:
    """Each model and side in fp32, as it was measured last."""
    last = {(row["model"], row["side"]): row for row in rows if row.get("way") == "fast"}
    template = f"{{model}} {{side}}×{{side}}, whole{place} | spandrel's forward | {_PARTS}"
    return [filled(row, template) for row in last.values()]


def set5(rows: Rows, place: str) -> list[str]:
    """Each bundled model, with others of its scale and its own self-ensemble."""
    means = {row["row"]: row["mean_db"] for row in rows if "pictures_db" in row}
    return [
        " | ".join(
            [
                f"{name}, ×{row['scale']}{place}",
                *(
                    figure("_db", means.get(one.format(name, row["scale"])))
                    for one in ("{}", "{}, self-ensemble", "cubic x{1}", "craft_x{1}")
                ),
            ]
        )
        for row in rows
        if "parameters" in row and (name := row["row"]) in means and name.startswith("lowtide")
    ]


def folder(rows: Rows, place: str) -> list[str]:
    """Each format."""
    return [
        filled(
            row,
            f"to {{format}}{place} | {{against_larger_part[in flight]:spread}}"
            " | {against_larger_part[one after another]:spread} | {processor}",
        )
        for row in rows
    ]


def startup(found: Results) -> list[str]:
    """The first command, which loads no library."""
    if STARTUP not in found:
        return []
    row = found[STARTUP]["rows"][0]
    return [f"`{row['row']}` answers after {row['wall_median_s']:.2f} s."]


STARTUP = "startup"
# By head: the result files that a table is of, and what makes lines of each.
TABLES: dict[str, list[tuple[str, Lines]]] = {
    "file to file, ×2 | budget | peak | processor seconds | accuracy | processor": [
        ("large_images", large_images),
        ("large_streamed", large_images),
        ("large_images_gpu", large_images),
    ],
    "run | compared with | of its processor time (range) | of its peak | results differ by"
    " | processor": [
        ("tile_loop", tile_loop),
        ("tile_loop_gpu", tile_loop),
        ("drct_photograph", photograph),
        ("streaming", streamed),
        ("fast_windows", fast_windows),
    ],
    "Set5 | PSNR-Y | with self-ensemble | cubic | CRAFT": [("set5", set5)],
    "30 photographs, one thread | clock time, of computing or files alone, whichever is longer"
    " (range) | one after another | processor": [("folder_pipeline", folder)],
}
NAMES = (*(name for sides in TABLES.values() for name, _ in sides), STARTUP)
