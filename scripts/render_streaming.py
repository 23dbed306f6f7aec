"""The table of streamed models, for ``render_results.py``."""

from __future__ import annotations

from typing import Any

from tables import Rows, spread, table

from lowtide.core.units import format_bytes


def streaming(rows: Rows) -> str:
    """A line for each model, size and way, in the order of names and sizes; what is not complete
    yet is left out."""
    head = [
        "model and size",
        "way",
        "budget",
        "peak",
        "of the whole's",
        "processor s",
        "of the whole's (range)",
        "heap to 1 GiB",
        "command line's heap",
        "glibc's own heap",
        "largest difference",
        "from fp64 (each input)",
        "one of 100 000 from fp64",
        "rms from fp64",
        "PSNR",
        "processor",
    ]
    done = [row for row in rows if "cpu_s" in row]
    models = list(dict.fromkeys(row["model"] for row in done))
    done.sort(key=lambda row: (models.index(row["model"]), row["height"]))
    return table(
        head,
        [
            [
                f"{row['model']}, {row['height']}×{row['width']}",
                row["way"],
                format_bytes(row["budget_bytes"]) if "budget_bytes" in row else "–",
                format_bytes(row["peak_bytes"]),
                f"{row['share_of_peak']:.0%}",
                _median(row["cpu_s"]),
                _ranged(row),
                _in_heap(row, "to_1GiB"),
                _in_heap(row, "command_line"),
                _in_heap(row, "glibc"),
                f"{row['max_abs_error']:.1e}",
                *_from_exact(row),
                _decibels(row["psnr_db"], "–"),
                row["processor"],
            ]
            for row in done
        ],
    )


def _from_exact(row: dict[str, Any]) -> tuple[str, str, str]:
    """The largest difference from fp64 of all inputs, that of their tails, and the mean one."""
    if "errors_to_fp64" not in row:
        return "–", "–", "–"
    means = row["rms_errors_to_fp64"]
    tails = row.get("tail_errors_to_fp64")
    return (
        _largest(row["errors_to_fp64"]),
        _largest(tails) if tails else "–",
        f"{sum(means) / len(means):.2e}",
    )


def _largest(errors: list[float]) -> str:
    """The largest, and those of each input if there are several."""
    each = f" ({', '.join(f'{error:.2e}' for error in errors)})" if len(errors) > 1 else ""
    return f"{max(errors):.2e}{each}"


def _in_heap(row: dict[str, Any], heap: str) -> str:
    """Seconds and their part of the whole's in another heap than that of the other times."""
    seconds, ratio = f"{heap}_heap_cpu_s", f"{heap}_heap_ratio"
    return f"{_median(row[seconds])}, {row[ratio]['median']:.2f}" if seconds in row else "–"


def tiling_error(rows: Rows) -> str:
    """How far each way is from the whole run."""
    return table(
        ["run", "largest difference", "PSNR against the whole run"],
        [[row["row"], f"{row['max_abs_error']:.1e}", f"{row['psnr_db']:.1f} dB"] for row in rows],
    )


def streaming_gpu(rows: Rows) -> str:
    """Both ways of each model, copies of pages on the host, and what fits in a smaller GPU."""
    head = [
        "run",
        "peak",
        "said before",
        "reserved",
        "clock s (range)",
        "of the whole's (range)",
        "from the whole's",
        "from fp64",
    ]
    runs = table(
        head,
        [
            [row["row"], *((row["error"], *6 * "–") if "error" in row else _gpu_run(row))]
            for row in rows
            if row.get("way") in ("whole", "streamed")
        ],
    )
    profiles = [row for row in rows if "copies_s" in row]
    copies = table(
        ["pages on the host", "copies, s", "kernels, s", "copies hidden"],
        [
            [
                row["row"].removesuffix(", profile"),
                f"{row['copies_s']:.3f}",
                f"{row['kernels_s']:.3f}",
                "–" if row["copies_overlapped"] is None else f"{row['copies_overlapped']:.0%}",
            ]
            for row in profiles
        ],
    )
    limits = table(
        ["image and GPU memory", "whole", "streamed"],
        [
            [
                row["row"],
                *("fits" if row[way] else "out of memory" for way in ("whole", "streamed")),
            ]
            for row in rows
            if "card_bytes" in row
        ],
    )
    return "\n\n".join(
        [
            runs,
            *([copies] if profiles else []),
            limits,
        ]
    )


def _gpu_run(row: dict[str, Any]) -> list[str]:
    ranged = "{median:.3f} ({min:.3f} to {max:.3f})"
    errors = (row.get(name) for name in ("max_abs_error", "error_to_fp64"))
    own = (row.get(name) for name in ("told_bytes", "reserved_bytes"))
    return [
        format_bytes(row["peak_bytes"]),
        *("–" if size is None else format_bytes(size) for size in own),
        ranged.format(**row["wall_s"]),
        ranged.format(**row["ratio"]) if "ratio" in row else "–",
        *("–" if error is None else f"{error:.1e}" for error in errors),
    ]


def fast_windows(rows: Rows) -> str:
    """The tables of each processor."""
    processors = list(dict.fromkeys(row["processor"] for row in rows))
    parts = [[row for row in rows if row["processor"] == one] for one in processors]
    if len(parts) == 1:
        return _fast_windows(parts[0])
    return "\n\n".join(
        f"{one}:\n\n{_fast_windows(part)}" for one, part in zip(processors, parts, strict=True)
    )


def _fast_windows(rows: Rows) -> str:
    """Both strategies of each model, then the difference of their results."""
    head = [
        "model and image",
        "way",
        "peak",
        "of spandrel's",
        "processor s",
        "of spandrel's (range)",
        "largest difference",
        "PSNR",
    ]
    times = table(
        head,
        [
            [
                f"{row['model']}, {row['side']}²",
                row["way"],
                format_bytes(row["peak_bytes"]),
                f"{row['share_of_peak']:.0%}",
                _median(row["cpu_s"]),
                _ranged(row),
                f"{row['max_abs_error']:.1e}",
                _decibels(row["psnr_db"], "–"),
            ]
            for row in rows
            if "cpu_s" in row
        ],
    )
    compared = [row for row in rows if "by_size" in row]
    sizes = list(compared[0]["by_size"]) if compared else []
    errors = table(
        ["largest difference at", *sizes],
        [
            [row["model"], *(f"{error:.1e}" for error in row["by_size"].values())]
            for row in compared
        ],
    )
    return f"{times}\n\n{errors}"


def seams(rows: Rows) -> str:
    """Each blending and overlap."""
    head = [
        "blending",
        "overlap",
        "tiles",
        "work",
        "PSNR against the whole",
        "at seams",
        "steps across cuts off by",
        "largest",
    ]
    return table(
        head,
        [
            [
                row["blend"],
                str(row["overlap"] or "–"),
                str(row["tiles"]) if row["overlap"] else "–",
                f"{row['work']:.2f}×",
                *(_decibels(row[key]) for key in ("psnr_db", "seam_psnr_db")),
                f"{row['step']:.3f} of 255",
                f"{row['largest']:.2f} of 255",
            ]
            for row in rows
        ],
    )


def drct_photograph(rows: Rows) -> str:
    """Each way against Lowtide."""
    head = [
        "way",
        "peak",
        "of Lowtide's",
        "processor s",
        "of Lowtide's (range)",
        "against the whole, of 255",
        "PSNR",
    ]
    return table(
        head,
        [
            [
                row["row"],
                format_bytes(row["peak_bytes"]),
                f"{row['share_of_peak']:.2f}",
                _median(row["cpu_s"]),
                _ranged(row),
                f"at most {row['largest_difference_of_255']}",
                _decibels(row["psnr_db"]),
            ]
            for row in _ways(rows)
        ],
    )


def _ways(rows: Rows) -> Rows:
    """What peaks and turns come to, once all are there."""
    return [row for row in rows if "ratio" in row]


def folder_pipeline(rows: Rows) -> str:
    """The job both ways, against its parts."""
    ways = list(rows[0]["wall_s"]) if rows else []
    head = [
        "results",
        *(f"{way}, s" for way in ways),
        "one after another, of the larger part (range)",
        "in flight (range)",
    ]
    return table(
        head,
        [
            [
                row["format"],
                *(f"{row['wall_s'][way]:.2f}" for way in ways),
                *(spread(figures) for figures in row["against_larger_part"].values()),
            ]
            for row in rows
        ],
    )


def worker_processes(rows: Rows) -> str:
    """Each way by the clock."""
    ways = list(rows[0]["wall_s"]) if rows else []
    head = [
        "model",
        *(f"{way}, s (for two images)" for way in ways),
        "two processes as fast as one with one thread (range)",
        "same files",
    ]
    return table(
        head,
        [
            [
                row["row"],
                *(
                    f"{row['wall_s'][way]:.1f} ({row['two_images_wall_s'][way]:.1f})"
                    for way in ways
                ),
                f"{spread(row['times_as_fast'][ways[-1]])}×",
                "yes" if row["same_files"] else "no",
            ]
            for row in rows
        ],
    )


def compiled(rows: Rows) -> str:
    """Each model compiled, against itself uncompiled."""
    head = [
        "model",
        "first result after, s",
        "with PyTorch's cache, s",
        "processor s a tile",
        "of the plain one's (range)",
        "largest difference",
        "peak, plain",
        "compiling",
        "from the cache",
    ]
    return table(
        head,
        [
            [
                row["row"],
                f"{row['warmup_s']:.0f}",
                f"{row['warmup_cached_s']:.0f}",
                _median(row["cpu_s"]["compiled"], 3),
                _ranged(row),
                f"{row['max_abs_error']:.1e}",
                *(format_bytes(count) for count in row["peak_bytes"].values()),
            ]
            for row in rows
        ],
    )


def _decibels(psnr: float | None, same: str = "the same") -> str:
    return same if psnr is None else f"{psnr:.1f} dB"


def _median(seconds: list[float], digits: int = 1) -> str:
    return f"{sorted(seconds)[len(seconds) // 2]:.{digits}f}"


def _ranged(row: dict[str, Any]) -> str:
    return spread(row["ratio"])


SHAPES = {
    "streaming": streaming,
    "tiling_error": tiling_error,
    "streaming_gpu": streaming_gpu,
    "fast_windows": fast_windows,
    "drct_photograph": drct_photograph,
    "seams": seams,
    "folder_pipeline": folder_pipeline,
    "worker_processes": worker_processes,
    "compiled": compiled,
}
