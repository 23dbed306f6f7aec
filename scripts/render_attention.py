"""Tables of the attention benchmarks."""

from __future__ import annotations

from tables import Rows, table

from lowtide.core.units import format_bytes


def modules(rows: Rows) -> str:
    """Time and workspace by size, then the workspace of rows of windows."""
    timed = [row for row in rows if "cpu_s" in row]
    held = {
        (row["module"], row["side"]): row["workspace_bytes"]
        for row in rows
        if "side" in row and "workspace_bytes" in row
    }
    by_one = {(row["module"], row["side"]): row for row in timed if row["threads"] == 1}
    timed = [row for row in timed if row["threads"] > 1]
    sides = sorted({row["side"] for row in timed})
    parts = []
    for side in sides:
        cells = [
            [
                row["module"],
                f"{1000 * row['cpu_s']:.1f}",
                _ratio(row["ratio"]),
                _ratio(by_one[key]["ratio"]) if (key := (row["module"], side)) in by_one else "–",
                format_bytes(held[key]) if key in held else "–",
            ]
            for row in timed
            if row["side"] == side
        ]
        head = [
            f"{side}² pixels, 64 channels",
            "processor ms",
            "times the halo's (range)",
            "the same by one thread",
            "workspace",
        ]
        parts.append(table(head, cells))
    strips = [row for row in rows if "bytes_per_column" in row]
    cells = [
        [
            row["module"],
            f"{row['height']}×{row['width']}",
            format_bytes(row["workspace_bytes"]),
            f"{row['bytes_per_column'] / 1024:.0f} KiB",
        ]
        for row in strips
    ]
    parts.append(table(["module", "height × width", "workspace", "for each column"], cells))
    return "\n\n".join(parts)


def _ratio(ratio: dict[str, float]) -> str:
    return f"{ratio['median']:.3g} ({ratio['min']:.3g} to {ratio['max']:.3g})"


def denoiser(rows: Rows) -> str:
    """One line for each module."""
    head = [
        "attention",
        "parameters",
        "loss, first steps",
        "loss, last steps",
        "PSNR, noisy",
        "PSNR",
        "processor s",
        "peak of a step",
    ]
    return table(
        head,
        [
            [
                row["row"],
                str(row["parameters"]),
                f"{row['first_loss']:.5f}",
                f"{row['last_loss']:.5f}",
                f"{row['noisy_psnr_db']:.2f} dB",
                f"{row['psnr_db']:.2f} dB",
                f"{row['cpu_s']:.0f}",
                format_bytes(row["peak_bytes"]),
            ]
            for row in rows
        ],
    )


def on_gpu(rows: Rows) -> str:
    """A table for each size and number of heads."""
    timed = [row for row in rows if "wall_s" in row]
    parts = []
    for side, heads, dim in sorted({(row["side"], row["heads"], row["head_dim"]) for row in timed}):
        shape = {"side": side, "heads": heads, "head_dim": dim}
        found = {(row["way"], row["what"]): row for row in timed if shape.items() <= row.items()}
        ways = dict.fromkeys(way for way, _ in found)
        head = [
            f"{side}² pixels, {heads} × {dim} channels",
            "forward, ms (range)",
            "of the roofline",
            "with backward, ms (range)",
            "from fp32",
        ]
        parts.append(
            table(
                head,
                [
                    [
                        way,
                        _ms(found[way, "forward"]),
                        f"{found[way, 'forward']['share_of_roofline']:.0%}",
                        _ms(found[way, "with backward"])
                        if (way, "with backward") in found
                        else "–",
                        f"{found[way, 'forward']['largest_difference']:.1e}",
                    ]
                    for way in ways
                ],
            )
        )
    return "\n\n".join(parts)


def _ms(row: dict[str, float]) -> str:
    middle, least, most = (1000 * row[name] for name in ("wall_s", "wall_min_s", "wall_max_s"))
    return f"{middle:.2f} ({least:.2f} to {most:.2f})"


SHAPES = {
    "attention_modules": modules,
    "attention_denoiser": denoiser,
    "attention_gpu": on_gpu,
}
