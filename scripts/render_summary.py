"""The summary in README.md: Lowtide's cost against that of alternatives; see
``render_results.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tables import Cells, Rows, figure, named, spread, table

from lowtide.core.units import format_bytes

Results = dict[str, dict[str, Any]]

# With what follows such a name in a result file, it was measured on a GPU.
GPU = "_gpu"
LARGE, LARGE_BANDS, LOOP, PHOTOGRAPH, BANDS, WINDOWS, FOLDER, SET5, STARTUP = (
    "large_images",
    "large_streamed",
    "tile_loop",
    "drct_photograph",
    "streaming",
    "fast_windows",
    "folder_pipeline",
    "set5",
    "startup",
)
NAMES = (
    LARGE,
    LARGE_BANDS,
    LOOP,
    PHOTOGRAPH,
    BANDS,
    WINDOWS,
    FOLDER,
    SET5,
    STARTUP,
    LARGE + GPU,
    LOOP + GPU,
)


def summary(found: Results) -> list[str]:
    """A table for each question that a newcomer has, of the files that there are."""
    large = (LARGE, LARGE_BANDS, LARGE + GPU)
    files = [cells for name in large for cells in _of(found, name, large_images)]
    sides: list[tuple[str, Callable[[Rows, str], Cells]]] = [
        (LOOP, tile_loop),
        (LOOP + GPU, tile_loop),
        (PHOTOGRAPH, photograph),
        (BANDS, streamed),
        (WINDOWS, fast_windows),
    ]
    compared = [cells for name, lines in sides for cells in _of(found, name, lines)]
    tables = [
        (
            ["file to file, ×2", "budget", "peak", "processor seconds", "accuracy", "processor"],
            files,
        ),
        (
            [
                "run",
                "compared with",
                "of its processor time (range)",
                "of its peak",
                "results differ by",
                "processor",
            ],
            compared,
        ),
        (["Set5", "PSNR-Y", "with self-ensemble", "cubic", "CRAFT"], _of(found, SET5, set5)),
        (
            [
                "30 photographs, one thread",
                "clock time, of computing or files alone, whichever is longer (range)",
                "one after another",
                "processor",
            ],
            _of(found, FOLDER, folder),
        ),
    ]
    return [*(table(head, cells) for head, cells in tables if cells), *startup(found)]


def _of(found: Results, name: str, lines: Callable[[Rows, str], Cells]) -> Cells:
    """What one result file has to say, if there is one."""
    if name not in found:
        return []
    return lines(named(found[name]), ", on a GPU" if name.endswith(GPU) else "")


def large_images(rows: Rows, place: str) -> Cells:
    """Each size, by the way that the plan chose or by bands."""
    keys = ("budget", "peak_bytes", "cpu_s", "accuracy")
    return [
        [f"{row['row']}{place}", *(figure(key, row[key]) for key in keys), processor(row)]
        for row in rows
        if "width" in row and row.get("way", "streamed") == "streamed"
    ]


def tile_loop(rows: Rows, place: str) -> Cells:
    """Lowtide against the tile loop."""
    by_name = {row["row"]: row for row in rows}
    if not {"lowtide", "comparison"} <= by_name.keys():
        return []
    compared = by_name["comparison"]
    # The processor waits while a GPU works, so that only wall time shows its time.
    time = spread(compared["wall_s_ratio" if place else "cpu_s_ratio"])
    return [
        [
            f"2 megapixels enlarged ×2{place}",
            "the usual tile loop",
            f"{time} of its clock time" if place else time,
            f"{compared['peak_bytes_ratio']['median']:.2f}",
            f"{compared['largest_difference_of_255']} of 255",
            processor(compared),
        ]
    ]


def photograph(rows: Rows, place: str) -> Cells:
    """Lowtide beside each other way; the file tells the others' parts of Lowtide, and how far all
    are from the whole run."""
    ways = {row["row"]: row for row in rows if "ratio" in row}
    if (own := ways.pop("Lowtide", None)) is None:
        return []
    of_whole = f"(from the whole; Lowtide's: {own['largest_difference_of_255']})"
    return [
        [
            f"512×384 through DRCT ×4, file to file{place}",
            row["row"],
            spread(
                {
                    "median": 1 / row["ratio"]["median"],
                    "min": 1 / row["ratio"]["max"],
                    "max": 1 / row["ratio"]["min"],
                }
            ),
            f"{1 / row['share_of_peak']:.2f}",
            f"{row['largest_difference_of_255']} of 255 {of_whole}",
            processor(row),
        ]
        for row in ways.values()
    ]


def streamed(rows: Rows, place: str) -> Cells:
    """Each model's run with pages in memory, at its largest size, in fp32; in bf16 two runs differ
    by what the type rounds, which takes more words."""
    done = [
        row
        for row in rows
        if "cpu_s" in row and row["way"].endswith("pages in memory") and "bf16" not in row["model"]
    ]
    largest = {row["model"]: row for row in sorted(done, key=lambda row: row["height"])}
    return [
        [
            f"{name} {row['height']}×{row['width']}, streamed in"
            f" {format_bytes(row['budget_bytes'])}{place}",
            "the whole run",
            *_parts(row),
        ]
        for name, row in largest.items()
    ]


def fast_windows(rows: Rows, place: str) -> Cells:
    """Each model and side in fp32, as it was measured last."""
    last = {(row["model"], row["side"]): row for row in rows if row.get("way") == "fast"}
    return [
        [f"{model} {side}×{side}, whole{place}", "spandrel's forward", *_parts(row)]
        for (model, side), row in last.items()
    ]


def _parts(row: dict[str, Any]) -> list[str]:
    """What a run takes of the other's time and peak, how far it is from it, and where."""
    return [
        spread(row["ratio"]),
        f"{row['share_of_peak']:.2f}",
        f"{row['max_abs_error']:.1e}",
        processor(row),
    ]


def processor(row: dict[str, Any]) -> str:
    """Its name without the marks."""
    return row["processor"].replace("(R)", "").removesuffix(" Processor")


def set5(rows: Rows, place: str) -> Cells:
    """Each bundled model, with others of its scale and its own self-ensemble."""
    means = {row["row"]: row["mean_db"] for row in rows if "pictures_db" in row}
    return [
        [
            f"{row['row']}, ×{row['scale']}{place}",
            *(
                figure("_db", means.get(name))
                for name in (
                    row["row"],
                    f"{row['row']}, self-ensemble",
                    f"cubic x{row['scale']}",
                    f"craft_x{row['scale']}",
                )
            ),
        ]
        for row in rows
        if "parameters" in row and row["row"] in means and row["row"].startswith("lowtide")
    ]


def folder(rows: Rows, place: str) -> Cells:
    """Each format."""
    return [
        [
            f"to {row['format']}{place}",
            *(
                spread(row["against_larger_part"][way])
                for way in ("in flight", "one after another")
            ),
            processor(row),
        ]
        for row in rows
    ]


def startup(found: Results) -> list[str]:
    """The first command, which loads no library."""
    if STARTUP not in found:
        return []
    row = found[STARTUP]["rows"][0]
    return [f"`{row['row']}` answers after {row['wall_median_s']:.2f} s."]
