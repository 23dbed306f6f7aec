"""The tables of videos; see ``render_results.py``."""

from __future__ import annotations

from collections.abc import Callable

from tables import Rows, figure, table

_MEMORY = {
    "peak_bytes": "peak",
    "high_water_bytes": "high-water mark",
    "predicted_bytes": "expected",
    "upper_bytes": "at most",
}


def video(rows: Rows) -> str:
    """What files keep, colors, cost of a frame, memory over the length, and kills."""
    parts = {row["part"]: [one for one in rows if one["part"] == row["part"]] for row in rows}
    return "\n\n".join(shape(parts[name]) for name, shape in _PARTS.items() if name in parts)


def _files(rows: Rows) -> str:
    head = ["file", "encoder", "frames", "stamps off by", "sound", "tags of color", "what differs"]
    head += ["peak", "at most"]
    cells = []
    for row in rows:
        stamps = f"{row['stamps_off_ticks']:.2g} of a tick of {1000 * row['tick_seconds']:.3g} ms"
        sound = f"{row['sound_packets']} packets, bytes and times equal"
        if not row["sound_equal"]:
            sound = "**differs**"
        cells.append(
            [
                row["row"],
                row["encoder"],
                f"{row['frames_out']} of {row['frames_in']}",
                stamps,
                sound if row["sound_packets"] else "none",
                "equal" if row["tags_equal"] else "**differ**",
                ", ".join(row["differs"]) or "nothing",
                figure("peak_bytes", row["peak_bytes"]),
                figure("upper_bytes", row["upper_bytes"]),
            ]
        )
    return (
        "Of the frame count, color tags, rotation, pixel aspect, titles, languages, dispositions,"
        " chapters, attachments, subtitles, and when each stream begins:\n\n" + table(head, cells)
    )


def _colors(rows: Rows) -> str:
    head = ["10 bits", "codes", "kept by a model that changes nothing", "mixed colors: off by"]
    return table(
        head,
        [
            [
                row["row"],
                f"{row['codes']:,}",
                f"{row['codes_kept']:,}",
                f"{row['from_exact_codes']:.4f} codes" if "from_exact_codes" in row else "–",
            ]
            for row in rows
        ],
    )


def _cost(rows: Rows) -> str:
    shown = {
        "files_s": "reading, color and writing",
        "read_s": "reading",
        "to_rgb_s": "to RGB",
        "to_yuv_s": "from RGB",
        "encode_s": "encoding",
        "ffmpeg_s": "FFmpeg's decoder and encoder alone",
        "job_s": "the job",
        "other_threads_s": "of it, outside of the network's thread",
    }
    cells = [[row["row"], *(f"{row[name]:.3f}" for name in shown)] for row in rows]
    return table(["processor seconds a frame", *shown.values()], cells)


def _length(rows: Rows) -> str:
    head = ["length", "frames", *_MEMORY.values(), "processor seconds"]
    cells = [
        [
            row["row"],
            f"{row['frames']:,}",
            *(figure(name, row[name]) for name in _MEMORY),
            figure("cpu_s", row["cpu_s"]),
        ]
        for row in rows
    ]
    return table(head, cells)


def _kills(rows: Rows) -> str:
    said = []
    for row in rows:
        equal = "are those" if row["packets_equal"] else "**are not those**"
        moments = ", ".join(
            f"{moment} ({done} of {row['segments']} segments finished)"
            for moment, done in zip(row["moments"], row["segments_before"], strict=True)
        )
        said.append(
            f"Killed {row['kills']} times, {moments}: the {row['packets']} packets {equal} of a"
            " run that was left alone."
        )
    return "\n\n".join(said)


_PARTS: dict[str, Callable[[Rows], str]] = {
    "files": _files,
    "colors": _colors,
    "cost": _cost,
    "length": _length,
    "kills": _kills,
}
SHAPES: dict[str, Callable[[Rows], str]] = {"video": video}
