"""The tables of the ParagonSR2 family, for ``render_results.py``."""

from __future__ import annotations

from tables import NONE, Row, Rows, by_part, filled, table, tabled

_SCALES = (1, 2, 3, 4, 8)


def paragonsr2_variants(rows: Rows) -> str:
    """A table for each part that was measured, its lines from the smallest network on, in whatever
    order they were measured."""
    models = [*dict.fromkeys(row["model"] for row in rows)]
    rows = sorted(rows, key=lambda row: (models.index(row["model"]), row["scale"]))
    return by_part(rows, {"a": _sizes, "b": _attention, "c": _bands, "d": _jobs, "e": _predicted})


def _sizes(rows: Rows) -> str:
    """Part a: weights and work, a line for each network and attention."""
    found: dict[str, dict[int, str]] = {}
    for row in rows:
        for attention in ("window", "none"):
            if one := row.get(attention):
                cell = filled(one, "{parameters:,} / {flops_per_pixel:,}")
                found.setdefault(f"{row['model']} | {attention}", {})[row["scale"]] = cell
    return table(
        f"weights / FLOPs per input pixel | attention | {' | '.join(f'×{one}' for one in _SCALES)}",
        [
            f"{names} | {' | '.join(cells.get(scale, NONE) for scale in _SCALES)}"
            for names, cells in found.items()
        ],
    )


def _attention(rows: Rows) -> str:
    """Part b: peaks and times with attention and without."""
    peaks = {
        (row["model"], row["scale"], row["attention"]): row["peak_bytes"]
        for row in rows
        if "cpu_s" not in row
    }

    def found(row: Row) -> str:
        figures = {
            f"{way}_{name}": value
            for way in ("window", "none")
            for name, value in (
                ("peak", peaks.get((row["model"], row["scale"], way))),
                ("seconds", row["cpu_s"].get(way)),
            )
        }
        return filled(
            {**figures, "ratio": row["ratio"].get("window")},
            "{window_peak:bytes} | {none_peak:bytes} | {window_seconds:median.3f s}"
            " | {none_seconds:median.3f s} | {ratio:spread}",
        )

    return tabled(
        [row for row in rows if "cpu_s" in row],
        "128×128 pixels | peak with attention | without | processor time with | without"
        " | with, of without (range)",
        "{model} ×{scale} | {found}",
        found=found,
    )


def _bands(rows: Rows) -> str:
    """Part c: the whole and the streamed run of one picture."""
    named = {row["row"]: row for row in rows}

    def title(row: Row) -> str:
        return row["row"].removesuffix(", times")

    def streamed(row: Row) -> str:
        whole, one = (named[f"{title(row)}, {way}"] for way in ("whole", "streamed"))
        share = f"{one['peak_bytes'] / whole['peak_bytes']:.0%}"
        share += ", the heap keeping small blocks" if "allocator" in one else ""
        peaks = {"whole": whole["peak_bytes"], "streamed": one["peak_bytes"]}
        return filled(peaks, f"{{whole:bytes}} | {{streamed:bytes}} ({share})")

    return tabled(
        [row for row in rows if row["row"].endswith(", times")],
        "in bands | peak of the whole | streamed | processor time of the whole | streamed"
        " | streamed, of the whole (range) | largest difference",
        "{title} | {peaks} | {cpu_s[whole]:median.1f s} | {cpu_s[streamed]:median.1f s}"
        " | {ratio[streamed]:spread} | {max_abs_error:.1e}",
        title=title,
        peaks=streamed,
    )


def _jobs(rows: Rows) -> str:
    """Part d: files under a budget."""
    return tabled(
        rows,
        "photograph, file to file | budget | peak | expected | within | plan",
        "{model} ×{scale}, {side}² | {budget_bytes:bytes} | {peak_bytes:bytes}"
        " | {predicted_bytes:bytes} | {within_budget:yes} | {plan}",
    )


def _predicted(rows: Rows) -> str:
    """Part e: predicted memory on a GPU, and the announced one."""
    found: dict[str, list[str]] = {}
    for row in rows:
        claim = NONE
        if "claimed_bytes" in row:
            low, high = row["claimed_bytes"]
            claim = f"{low / 2**30:.1f} to {high / 2**30:.1f}"
            claim += "" if row["within_claim"] else ", exceeded"
        cell = f"{row['predicted_bytes'] / 2**30:.2f} ({claim})"
        found.setdefault(f"{row['model']} ×{row['scale']}", []).append(cell)
    return table(
        "on rtx3060-12gb, GiB expected (and announced) | 128×128 | 512×512 | 1024×1024"
        " | training, 16 of 64 px",
        [" | ".join([name, *cells, *[NONE] * (4 - len(cells))]) for name, cells in found.items()],
    )


SHAPES = {"paragonsr2_variants": paragonsr2_variants}
