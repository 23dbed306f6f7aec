"""The tables of denoising; see ``render_results.py``."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from tables import NONE, Rows, figure, spread, table

from lowtide.core.units import format_bytes

RATIOS = (100, 300)
DECIBELS = ("noisy_db", "given_db", "estimated_db", "two_steps_db")


def denoise(rows: Rows) -> str:
    """Each picture and level: ours next to non-local means and TV, losses included."""
    head = [
        "picture, noise",
        "noisy",
        "level given",
        "level estimated",
        "in two steps",
        "estimate",
        "lost by it",
    ]
    head += ["non-local means", "TV", "above the better of both", "SSIM"]
    head += ["processor seconds", "of non-local means", "of TV"]
    cells, below = [], []
    for row in rows:
        gain = row["estimated_db"] - max(row["nlm_db"], row["tv_db"])
        if gain < 0:
            below.append(row["row"])
        decibels = [f"{row[name]:.2f}" for name in DECIBELS]
        cells.append(
            [
                row["row"],
                *decibels,
                f"{row['estimated_sigma']:.1f}",
                f"{row['given_db'] - row['estimated_db']:+.2f}",
                f"{row['nlm_db']:.2f} ({row['nlm_unclipped_db']:.2f})",
                f"{row['tv_db']:.2f}",
                f"{gain:+.2f}",
                f"{row['estimated_ssim']:.3f}",
                *(f"{row[name]:.2f}" for name in ("estimated_cpu_s", "nlm_cpu_s", "tv_cpu_s")),
            ]
        )
    lost = ", ".join(below) or "none"
    return (
        "PSNR in dB. Non-local means and TV are scikit-image's with the level given, the best of"
        " three settings each, and clipped to 0..1 as Lowtide's results are (in brackets: as they"
        f" come).\n\n{table(head, cells)}\n\nBelow non-local means or TV: {lost}."
    )


def denoise_raw_noise(rows: Rows) -> str:
    """Each training, and how far the camera's own noise is above it."""
    own = next((row for row in rows if row["row"] == "raw-camera"), None)
    head = ["trained with", "steps", "processor seconds"]
    for ratio in RATIOS:
        head += [f"×{ratio}", "brightness-aligned", "SSIM", "raw-camera above it"]
    cells = []
    for row in rows:
        line = [row["row"], str(row["steps"]), f"{row['cpu_s']:.0f}"]
        for ratio in RATIOS:
            db = row[f"x{ratio}_db"]
            line += [f"{db:.2f} dB", f"{row[f'x{ratio}_aligned_db']:.2f} dB"]
            line += [f"{row[f'x{ratio}_ssim']:.3f}"]
            line += [NONE if own in (None, row) else f"{own[f'x{ratio}_db'] - db:+.2f} dB"]
        cells.append(line)
    noisy = ", ".join(f"×{ratio} {rows[0][f'x{ratio}_noisy_db']:.2f} dB" for ratio in RATIOS)
    return f"Before denoising: {noisy}.\n\n{table(head, cells)}"


def denoise_large(rows: Rows) -> str:
    """Each size and way, within the budget, and next to the whole run."""
    shown = {
        "peak_bytes": "peak",
        "high_water_bytes": "high-water mark",
        "process_bytes": "the process, libraries included",
        "predicted_bytes": "expected",
        "upper_bytes": "at most",
        "cpu_s": "processor seconds",
    }
    head = ["image", "budget", "plan", *shown.values(), "from the whole run"]
    return table(
        head,
        [
            [
                row["row"],
                row["budget"],
                row["plan"],
                *(figure(name, row[name]) for name in shown),
                f"{row['difference']:.1e}" if "difference" in row else NONE,
            ]
            for row in rows
        ],
    )


def attention(rows: Rows) -> str:
    """Modules alone, then training steps of networks with them."""
    parts = []
    for row in (row for row in rows if row["part"] == "modules"):
        cells = [
            [
                name,
                format_bytes(one["activations_bytes"]),
                f"{median(one['cpu_s']):.3f}",
                spread(one["ratio"]),
            ]
            for name, one in row["ways"].items()
        ]
        head = ["one module", "peak", "processor seconds", "of linear's (range)"]
        parts.append(table(head, cells))
    head = ["network with", "checkpointing", "peak", "saved", "processor seconds", "of none's"]
    cells = [
        [
            f"{row['row'].removeprefix('networks, ')} attention",
            way,
            format_bytes(one["activations_bytes"]),
            f"{one['saved_percent']:.0f} %",
            f"{median(one['cpu_s']):.2f}",
            spread(one["ratio"]),
        ]
        for row in rows
        if row["part"] == "networks"
        for way, one in row["ways"].items()
    ]
    return "\n\n".join([*parts, table(head, cells)] if cells else parts)


def steps(rows: Rows) -> str:
    """PSNR, time and repeatability by scheduler and number of steps."""
    head = ["scheduler", "steps", "PSNR", "processor seconds", "runs agree", "seeds differ by"]
    cells = [
        [
            "any" if row["steps"] == 1 else f"`{row['scheduler']}`",
            str(row["steps"]),
            f"{row['psnr_db']:.2f} dB",
            f"{row['cpu_s']:.1f}",
            "in every bit" if row["equal_bits"] else "no",
            f"{row['seed_deviation']:.2f} of 255" if row["seed_deviation"] else NONE,
        ]
        for row in rows
    ]
    return table(head, cells)


def mri(rows: Rows) -> str:
    """What files keep, and tensors that are fitted to them after each method."""
    head = ["file, level", "shape", "header", "from the exact result", "clipped", "level", "peak"]
    files = [
        [
            row["row"],
            "×".join(map(str, row["shape"])),
            "equal in every bit" if row["header_equal"] else "differs",
            f"{row['largest_error_in_steps']:.4f} steps",
            f"{row['clipped']:,}",
            f"{row['sigma']:.3g}",
            format_bytes(row["peak_bytes"]),
        ]
        for row in rows
        if "shape" in row
    ]
    fit_head = ["series, method", "all finite", "residual of the fit", "mean FA", "mean MD"]
    fit_head += ["roughness of FA", "residual with the image", "with its neighbors", "seconds"]
    fits = []
    for row in (row for row in rows if "finite" in row):
        removed = row["residual"] or {}
        fits.append(
            [
                row["row"],
                "yes" if row["finite"] else "no",
                f"{row['fit_residual']:.1f}",
                f"{row['fa_mean']:.3f}",
                f"{1e3 * row['md_mean']:.3f}e-3",
                f"{row['fa_roughness']:.3f}",
                *(
                    f"{removed[name]:+.2f}" if removed else NONE
                    for name in ("image_correlation", "neighbor_correlation")
                ),
                f"{row['seconds']:.1f}",
            ]
        )
    return f"{table(head, files)}\n\n{table(fit_head, fits)}" if fits else table(head, files)


SHAPES: dict[str, Callable[[Rows], str]] = {
    "denoise": denoise,
    "denoise_attention": attention,
    "denoise_steps": steps,
    "denoise_raw_noise": denoise_raw_noise,
    "denoise_large": denoise_large,
    "denoise_mri": mri,
}
