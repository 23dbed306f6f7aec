"""The tables of videos and of video autoencoders; see ``render_results.py``."""

from __future__ import annotations

from statistics import median

from tables import NONE, Row, Rows, by_part, figure, filled, joined, table, tabled


def video(rows: Rows) -> str:
    """What files keep, colors, cost of a frame, memory over the length, and kills."""
    parts = {"files": _files, "colors": _colors, "cost": _cost, "length": _length, "kills": _kills}
    return by_part(rows, parts)


def _files(rows: Rows) -> str:
    def sound(row: Row) -> str:
        if not row["sound_packets"]:
            return "none"
        equal = f"{row['sound_packets']} packets, bytes and times equal"
        return equal if row["sound_equal"] else "**differs**"

    return (
        "Of the frame count, color tags, rotation, pixel aspect, titles, languages, dispositions,"
        " chapters, attachments, subtitles, and when each stream begins:\n\n"
    ) + tabled(
        rows,
        "file | encoder | frames | stamps off by | sound | tags of color | what differs | peak"
        " | at most",
        "{row} | {encoder} | {frames_out} of {frames_in} | {stamps_off_ticks:.2g} of a tick of"
        " {milliseconds:.3g ms} | {sound} | {tags} | {differences} | {peak_bytes:bytes}"
        " | {upper_bytes:bytes}",
        milliseconds=lambda row: 1000 * row["tick_seconds"],
        sound=sound,
        tags=lambda row: "equal" if row["tags_equal"] else "**differ**",
        differences=lambda row: ", ".join(row["differs"]) or "nothing",
    )


def _colors(rows: Rows) -> str:
    return tabled(
        rows,
        "10 bits | codes | kept by a model that changes nothing | mixed colors: off by",
        "{row} | {codes:,} | {codes_kept:,} | {from_exact_codes?:.4f codes}",
    )


def _cost(rows: Rows) -> str:
    return tabled(
        rows,
        "processor seconds a frame | reading, color and writing | reading | to RGB | from RGB"
        " | encoding | FFmpeg's decoder and encoder alone | the job"
        " | of it, outside of the network's thread",
        "{row} | {files_s:.3f} | {read_s:.3f} | {to_rgb_s:.3f} | {to_yuv_s:.3f} | {encode_s:.3f}"
        " | {ffmpeg_s:.3f} | {job_s:.3f} | {other_threads_s:.3f}",
    )


def _length(rows: Rows) -> str:
    return tabled(
        rows,
        "length | frames | peak | high-water mark | expected | at most | processor seconds",
        "{row} | {frames:,} | {peak_bytes:bytes} | {high_water_bytes:bytes}"
        " | {predicted_bytes:bytes} | {upper_bytes:bytes} | {seconds}",
        seconds=lambda row: figure("cpu_s", row["cpu_s"]),
    )


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
    return joined(*said)


def video_vae(rows: Rows) -> str:
    """Each way next to the plain decode of the same clip, then memory over the length."""
    return by_part(rows, {"decode": _decodes, "length": _lengths})


def _decodes(rows: Rows) -> str:
    clip = ("model", "width", "frames", "side")
    plain = {
        tuple(row[name] for name in clip): row for row in rows if row["way"] == "plain, sliced"
    }

    def of_plain(row: Row) -> Row:
        return plain[tuple(row[name] for name in clip)]

    def times(row: Row) -> str:
        """Processor seconds, their ratio to the plain ones, and the differences of the result."""
        if "cpu_s" not in row:
            return " | ".join([NONE] * 5)
        ratio = median(row["cpu_s"]) / median(of_plain(row)["cpu_s"])
        differences = "{max_abs_error:.1e} of {range:.2f} | {psnr_db:.0f dB}"
        if row["max_abs_error"] == 0:
            differences = f"none | {NONE}"
        return filled(
            row, f"{{cpu_s:median.1f}} | {ratio:.2f} | {{first_call_cpu_s:.0f}} | {differences}"
        )

    decodes = tabled(
        rows,
        "decode | budget | peak | of plain | planned | state moved | processor seconds | to plain"
        " | first call | largest difference | difference",
        "{row} | {budget:bytes} | {peak_bytes:bytes} | {share:.0%} | {planned}"
        " | {moved_bytes?:bytes} | {times}",
        budget=lambda row: row["budget_bytes"] or None,
        share=lambda row: row["peak_bytes"] / of_plain(row)["peak_bytes"],
        planned=_planned,
        times=times,
    )
    said = "{row} differs from the same in fp64 by up to {fp64_difference:.1e}."
    return joined(decodes, *(filled(row, said) for row in rows if "fp64_difference" in row))


def _planned(row: Row) -> str:
    if "predicted_bytes" not in row:
        return NONE
    off = row["predicted_bytes"] / row["peak_bytes"] - 1
    return filled(row, f"{{predicted_bytes:bytes}} ({off:+.1%})")


def _lengths(rows: Rows) -> str:
    return tabled(
        rows,
        "frames | peak | result | peak less result | planned | plan",
        "{row} | {peak_bytes:bytes} | {result_bytes:bytes} | {rest:bytes} | {planned} | {title}",
        rest=lambda row: row["peak_bytes"] - row["result_bytes"],
        planned=_planned,
        title=lambda row: row["plan"].split(";")[0],
    )


def video_vae_cards(rows: Rows) -> str:
    """Each part of each full-size model, by size of the frames and GPU."""
    return table(
        "model, frames | GPU | part | chunks | state | peak | host | disk | moved a frame"
        " | seconds a frame",
        [f"{_card(row)} | {part['part']} | {_part(part)}" for row in rows for part in row["parts"]],
    )


def _card(row: Row) -> str:
    model, size, _ = row["row"].split(", ")
    return f"{model}, {size} | {row['device_title'].removeprefix('NVIDIA GeForce ')}"


def _part(part: Row) -> str:
    """A part's plan, or from what memory on there is one."""
    if part["refusal"] is not None:
        needs = "" if part["smallest_bytes"] is None else "fits from {smallest_bytes:bytes} on"
        return filled(part, " | ".join(["none fits", NONE, needs or NONE, *[NONE] * 4]))
    order = "one by one" if part["together"] == 1 else "{together} in each band"
    places = {"memory": "GPU", "host": "host", "disk": "disk"}
    state = f"{{state_bytes:bytes}}, {places[part['state']]}" if part["state"] else NONE
    sizes = ("peak_bytes", "host_bytes", "disk_bytes", "moved_bytes_per_frame")
    shown = " | ".join(f"{{{name}:bytes}}" if part[name] else NONE for name in sizes)
    return filled(part, f"{order} | {state} | {shown} | {{seconds_per_frame:.2g}}")


def video_vae_recipes(rows: Rows) -> str:
    """Each recipe next to the plain decode, then the four phases of a restoration."""
    return by_part(rows, {"recipe": _recipes, "phases": _phases})


def _recipes(rows: Rows) -> str:
    plain = rows[0]

    def times(row: Row) -> str:
        if "cpu_s" not in row:
            return " | ".join([NONE] * 6)
        pairs = zip(row["cpu_s"], plain["cpu_s"], strict=True)
        psnr = "equal" if row["psnr_db"] is None else "{psnr_db:.1f dB}"
        return filled(
            {**row, "ratio": [one / other for one, other in pairs]},
            "{cpu_s:median.2f} | {ratio:median.2f}× | {max_abs_error:.1e} of {range:.2g}"
            f" | {psnr} | {{ssim:.4f}} | {{first_call_cpu_s:.1f}}",
        )

    return tabled(
        rows,
        "decode | peak | of plain's | processor seconds | of plain's | largest difference | PSNR"
        " | SSIM | first call",
        "{row} | {peak_bytes:bytes} | {share:.0%} | {times}",
        share=lambda row: row["peak_bytes"] / plain["peak_bytes"],
        times=times,
    )


def _phases(rows: Rows) -> str:
    said = (
        "Four phases of {frames} frames with a small random network between them, in processor"
        " seconds: encode {encode_s:.3f}, model {model_s:.3f}, decode {decode_s:.3f}, write"
        " {write_s:.3f}, together {fps} frames a second."
    )
    return joined(*(filled(row, said) for row in rows))


SHAPES = {
    "video": video,
    "video_vae": video_vae,
    "video_vae_cards": video_vae_cards,
    "video_vae_recipes": video_vae_recipes,
}
