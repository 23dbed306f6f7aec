"""The table of streamed models, for ``render_results.py``."""

from __future__ import annotations

from tables import NONE, Row, Rows, filled, joined, spread, tabled


def streaming(rows: Rows) -> str:
    """A line for each model, size and way, in the order of names and sizes; what is not complete
    yet is left out."""
    done = [row for row in rows if "cpu_s" in row]
    models = list(dict.fromkeys(row["model"] for row in done))
    done.sort(key=lambda row: (models.index(row["model"]), row["height"]))
    return tabled(
        done,
        "model and size | way | budget | peak | of the whole's | processor s"
        " | of the whole's (range) | heap to 1 GiB | command line's heap | glibc's own heap"
        " | largest difference | from fp64 (each input) | one of 100 000 from fp64 | rms from fp64"
        " | PSNR | processor",
        "{model}, {height}×{width} | {way} | {budget_bytes?:bytes} | {peak_bytes:bytes}"
        " | {share_of_peak:.0%} | {cpu_s:high.1f} | {ratio:spread} | {heaps}"
        " | {max_abs_error:.1e} | {largest} | {tail} | {rms:.2e} | {psnr_db:.1f dB} | {processor}",
        heaps=lambda row: " | ".join(
            _in_heap(row, heap) for heap in ("to_1GiB", "command_line", "glibc")
        ),
        largest=lambda row: _largest(row.get("errors_to_fp64")),
        tail=lambda row: _largest(row.get("tail_errors_to_fp64")),
        rms=lambda row: (means := row.get("rms_errors_to_fp64")) and sum(means) / len(means),
    )


def _largest(errors: list[float] | None) -> str:
    """The largest, and those of each input if there are several."""
    if not errors:
        return NONE
    each = f" ({', '.join(f'{error:.2e}' for error in errors)})" if len(errors) > 1 else ""
    return f"{max(errors):.2e}{each}"


def _in_heap(row: Row, heap: str) -> str:
    """Seconds and their part of the whole's in another heap than that of the other times."""
    name = f"{heap}_heap"
    if f"{name}_cpu_s" not in row:
        return NONE
    return filled(row, f"{{{name}_cpu_s:high.1f}}, {{{name}_ratio[median]:.2f}}")


def tiling_error(rows: Rows) -> str:
    """How far each way is from the whole run."""
    return tabled(
        rows,
        "run | largest difference | PSNR against the whole run",
        "{row} | {max_abs_error:.1e} | {psnr_db:.1f dB}",
    )


def streaming_gpu(rows: Rows) -> str:
    """Both ways of each model, copies of pages on the host, and what fits in a smaller GPU."""
    runs = tabled(
        [row for row in rows if row.get("way") in ("whole", "streamed")],
        "run | peak | said before | reserved | clock s (range) | of the whole's (range)"
        " | from the whole's | from fp64",
        "{row} | {peak} | {told_bytes?:bytes} | {reserved_bytes?:bytes} | {wall_s?:spread.3f}"
        " | {ratio?:spread.3f} | {max_abs_error?:.1e} | {error_to_fp64?:.1e}",
        peak=lambda row: row.get("error") or filled(row, "{peak_bytes:bytes}"),
    )
    copies = tabled(
        [row for row in rows if "copies_s" in row],
        "pages on the host | copies, s | kernels, s | copies hidden",
        "{title} | {copies_s:.3f} | {kernels_s:.3f} | {copies_overlapped:.0%}",
        title=lambda row: row["row"].removesuffix(", profile"),
    )
    limits = tabled(
        [row for row in rows if "card_bytes" in row],
        "image and GPU memory | whole | streamed",
        "{row} | {both}",
        both=lambda row: " | ".join(
            "fits" if row[way] else "out of memory" for way in ("whole", "streamed")
        ),
    )
    return joined(runs, copies, limits)


def fast_windows(rows: Rows) -> str:
    """The tables of each processor."""
    processors = list(dict.fromkeys(row["processor"] for row in rows))
    parts = [_fast_windows([row for row in rows if row["processor"] == one]) for one in processors]
    if len(parts) == 1:
        return parts[0]
    return joined(*(f"{one}:\n\n{part}" for one, part in zip(processors, parts, strict=True)))


def _fast_windows(rows: Rows) -> str:
    """Both strategies of each model, then the difference of their results."""
    times = tabled(
        [row for row in rows if "cpu_s" in row],
        "model and image | way | peak | of spandrel's | processor s | of spandrel's (range)"
        " | largest difference | PSNR",
        "{model}, {side}² | {way} | {peak_bytes:bytes} | {share_of_peak:.0%} | {cpu_s:high.1f}"
        " | {ratio:spread} | {max_abs_error:.1e} | {psnr_db:.1f dB}",
    )
    compared = [row for row in rows if "by_size" in row]
    errors = tabled(
        compared,
        " | ".join(["largest difference at", *(compared[0]["by_size"] if compared else [])]),
        "{model} | {each}",
        each=lambda row: " | ".join(f"{error:.1e}" for error in row["by_size"].values()),
    )
    return joined(times, errors)


def seams(rows: Rows) -> str:
    """Each blending and overlap."""
    return tabled(
        rows,
        "blending | overlap | tiles | work | PSNR against the whole | at seams"
        " | steps across cuts off by | largest",
        "{blend} | {tiles} | {work:.2f}× | {whole} | {seam}"
        " | {step:.3f of 255} | {largest:.2f of 255}",
        tiles=lambda row: f"{row['overlap'] or NONE} | {row['tiles'] if row['overlap'] else NONE}",
        whole=lambda row: _decibels(row["psnr_db"]),
        seam=lambda row: _decibels(row["seam_psnr_db"]),
    )


def drct_photograph(rows: Rows) -> str:
    """Each way against Lowtide."""
    return tabled(
        # What peaks and turns come to, once all are there.
        [row for row in rows if "ratio" in row],
        "way | peak | of Lowtide's | processor s | of Lowtide's (range) | against the whole, of 255"
        " | PSNR",
        "{row} | {peak_bytes:bytes} | {share_of_peak:.2f} | {cpu_s:high.1f} | {ratio:spread}"
        " | at most {largest_difference_of_255} | {psnr}",
        psnr=lambda row: _decibels(row["psnr_db"]),
    )


def _decibels(psnr: float | None) -> str:
    return "the same" if psnr is None else f"{psnr:.1f} dB"


def folder_pipeline(rows: Rows) -> str:
    """The job both ways, against its parts."""
    ways = " | ".join(f"{way}, s" for way in rows[0]["wall_s"])
    return tabled(
        rows,
        f"results | {ways} | one after another, of the larger part (range) | in flight (range)",
        "{format} | {seconds} | {parts}",
        seconds=lambda row: " | ".join(f"{one:.2f}" for one in row["wall_s"].values()),
        parts=lambda row: " | ".join(map(spread, row["against_larger_part"].values())),
    )


def worker_processes(rows: Rows) -> str:
    """Each way by the clock."""
    ways = list(rows[0]["wall_s"])
    return tabled(
        rows,
        f"model | {' | '.join(f'{way}, s (for two images)' for way in ways)}"
        " | two processes as fast as one with one thread (range) | same files",
        f"{{row}} | {{seconds}} | {{times_as_fast[{ways[-1]}]:spread}}× | {{same_files:yes}}",
        seconds=lambda row: " | ".join(
            f"{row['wall_s'][way]:.1f} ({row['two_images_wall_s'][way]:.1f})" for way in ways
        ),
    )


def compiled(rows: Rows) -> str:
    """Each model compiled, against itself uncompiled."""
    return tabled(
        rows,
        "model | first result after, s | with PyTorch's cache, s | processor s a tile"
        " | of the plain one's (range) | largest difference | peak, plain | compiling"
        " | from the cache",
        "{row} | {warmup_s:.0f} | {warmup_cached_s:.0f} | {cpu_s[compiled]:high.3f}"
        " | {ratio:spread} | {max_abs_error:.1e} | {peak_bytes[plain]:bytes}"
        " | {peak_bytes[compiled]:bytes} | {peak_bytes[from cache]:bytes}",
    )


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
