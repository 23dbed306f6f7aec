"""Tables of the attention benchmarks."""

from __future__ import annotations

from tables import Row, Rows, joined, tabled


def modules(rows: Rows) -> str:
    """Time and workspace by size, then the workspace of rows of windows."""

    def key(row: Row) -> tuple[str, int]:
        return row["module"], row["side"]

    timed = [row for row in rows if "cpu_s" in row]
    held = {
        key(row): row["workspace_bytes"]
        for row in rows
        if "side" in row and "workspace_bytes" in row
    }
    by_one = {key(row): row["ratio"] for row in timed if row["threads"] == 1}
    timed = [row for row in timed if row["threads"] > 1]
    parts = [
        tabled(
            [row for row in timed if row["side"] == side],
            f"{side}² pixels, 64 channels | processor ms | times the halo's (range)"
            " | the same by one thread | workspace",
            "{module} | {ms:.1f} | {ratio:spread.3g} | {by_one:spread.3g} | {held:bytes}",
            ms=lambda row: 1000 * row["cpu_s"],
            by_one=lambda row: by_one.get(key(row)),
            held=lambda row: held.get(key(row)),
        )
        for side in sorted({row["side"] for row in timed})
    ]
    strips = tabled(
        [row for row in rows if "bytes_per_column" in row],
        "module | height × width | workspace | for each column",
        "{module} | {height}×{width} | {workspace_bytes:bytes} | {kib:.0f KiB}",
        kib=lambda row: row["bytes_per_column"] / 1024,
    )
    return joined(*parts, strips)


def denoiser(rows: Rows) -> str:
    """One line for each module."""
    return tabled(
        rows,
        "attention | parameters | loss, first steps | loss, last steps | PSNR, noisy | PSNR"
        " | processor s | peak of a step",
        "{row} | {parameters} | {first_loss:.5f} | {last_loss:.5f} | {noisy_psnr_db:.2f dB}"
        " | {psnr_db:.2f dB} | {cpu_s:.0f} | {peak_bytes:bytes}",
    )


def on_gpu(rows: Rows) -> str:
    """A table for each size and number of heads."""
    timed = [row for row in rows if "wall_s" in row]
    parts = []
    for side, heads, dim in sorted({(row["side"], row["heads"], row["head_dim"]) for row in timed}):
        shape = {"side": side, "heads": heads, "head_dim": dim}
        found = [row for row in timed if shape.items() <= row.items()]
        backward = {row["way"]: _ms(row) for row in found if row["what"] == "with backward"}
        parts.append(
            tabled(
                [row for row in found if row["what"] == "forward"],
                f"{side}² pixels, {heads} × {dim} channels | forward, ms (range) | of the roofline"
                " | with backward, ms (range) | from fp32",
                "{way} | {forward:spread} | {share_of_roofline:.0%} | {backward:spread}"
                " | {largest_difference:.1e}",
                forward=_ms,
                backward=lambda row, backward=backward: backward.get(row["way"]),
            )
        )
    return joined(*parts)


def _ms(row: Row) -> dict[str, float]:
    names = {"median": "wall_s", "min": "wall_min_s", "max": "wall_max_s"}
    return {which: 1000 * row[name] for which, name in names.items()}


SHAPES = {
    "attention_modules": modules,
    "attention_denoiser": denoiser,
    "attention_gpu": on_gpu,
}
