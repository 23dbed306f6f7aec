"""The tables of denoising; see ``render_results.py``."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean
from typing import Any

from tables import NONE, Row, Rows, by_part, figure, filled, joined, table, tabled

RATIOS = (100, 300)


def denoise(rows: Rows) -> str:
    """Each picture and level: ours next to non-local means and TV, losses included."""

    def gain(row: Row) -> float:
        return row["estimated_db"] - max(row["nlm_db"], row["tv_db"])

    lost = ", ".join(row["row"] for row in rows if gain(row) < 0) or "none"
    found = tabled(
        rows,
        "picture, noise | noisy | level given | level estimated | in two steps | estimate"
        " | lost by it | non-local means | TV | above the better of both | SSIM"
        " | processor seconds | of non-local means | of TV",
        "{row} | {noisy_db:.2f} | {given_db:.2f} | {estimated_db:.2f} | {two_steps_db:.2f}"
        " | {estimated_sigma:.1f} | {lost:+.2f} | {nlm_db:.2f} ({nlm_unclipped_db:.2f})"
        " | {tv_db:.2f} | {gain:+.2f} | {estimated_ssim:.3f}"
        " | {estimated_cpu_s:.2f} | {nlm_cpu_s:.2f} | {tv_cpu_s:.2f}",
        lost=lambda row: row["given_db"] - row["estimated_db"],
        gain=gain,
    )
    return (
        "PSNR in dB. Non-local means and TV are scikit-image's with the level given, the best of"
        " three settings each, and clipped to 0..1 as Lowtide's results are (in brackets: as they"
        f" come).\n\n{found}\n\nBelow non-local means or TV: {lost}."
    )


def pictures(rows: Rows) -> str:
    """Each kind of noise: means over pictures, and the worst of them next to BM3D."""
    kinds = {row["kind"]: [one for one in rows if one["kind"] == row["kind"]] for row in rows}

    def over(name: str, made: Callable[[list[float]], float] = fmean) -> Callable[[Row], Any]:
        def value(row: Row) -> float | None:
            known = [one[name] for one in kinds[row["kind"]] if one.get(name) is not None]
            return made(known) if known else None

        return value

    for row in rows:
        if row.get("bm3d_db") is not None:
            row["above"] = row["lowtide_db"] - row["bm3d_db"]
    firsts = [same[0] for same in kinds.values()]
    noisy = [row for row in firsts if not row["kind"].startswith(("clean", "flat"))]
    changed = [row for row in firsts if row["kind"].startswith("clean")]
    flat = [row for row in firsts if row["kind"].startswith("flat")]
    return joined(
        tabled(
            noisy,
            "noise | noisy | Lowtide | above BM3D | the worst | processor seconds | of BM3D",
            "{kind} | {noisy:.2f dB} | {made:.2f dB} | {above:+.2f dB} | {worst:+.2f dB}"
            " | {cpu_s:.2f} | {bm3d_s:.1f}",
            noisy=over("noisy_db"),
            made=over("lowtide_db"),
            above=over("above"),
            worst=over("above", min),
            cpu_s=over("cpu_s"),
            bm3d_s=over("bm3d_cpu_s"),
        ),
        tabled(
            changed,
            "without noise | pictures | unchanged | the others to themselves, the worst",
            "{kind} | {count} | {same} | {worst:.1f dB}",
            count=lambda row: len(kinds[row["kind"]]),
            same=lambda row: sum(one["lowtide_db"] is None for one in kinds[row["kind"]]),
            worst=over("lowtide_db", min),
        ),
        tabled(
            flat,
            "one color, noise of | left, the most of four colors | shift, the most",
            "{kind} | {left:.2f} | {shift:.2f}",
            left=over("left", max),
            shift=over("shift", max),
        ),
    )


def denoise_raw_noise(rows: Rows) -> str:
    """Each training, and how far the camera's own noise is above it."""
    own = next((row for row in rows if row["row"] == "raw-camera"), None)
    head = "trained with | steps | processor seconds"
    lines = [filled(row, "{row} | {steps} | {cpu_s:.0f}") for row in rows]
    for ratio in RATIOS:
        x = f"x{ratio}"
        head += f" | ×{ratio} | brightness-aligned | SSIM | raw-camera above it"
        for place, row in enumerate(rows):
            above = None if own in (None, row) else own[f"{x}_db"] - row[f"{x}_db"]
            lines[place] += filled(
                {**row, "above": above},
                f" | {{{x}_db:.2f dB}} | {{{x}_aligned_db:.2f dB}} | {{{x}_ssim:.3f}}"
                " | {above:+.2f dB}",
            )
    noisy = ", ".join(f"×{ratio} {rows[0][f'x{ratio}_noisy_db']:.2f} dB" for ratio in RATIOS)
    return f"Before denoising: {noisy}.\n\n{table(head, lines)}"


def denoise_large(rows: Rows) -> str:
    """Each size and way, within the budget, and next to the whole run."""
    return tabled(
        rows,
        "image | budget | plan | peak | high-water mark | the process, libraries included"
        " | expected | at most | processor seconds | from the whole run",
        "{row} | {budget} | {plan} | {peak_bytes:bytes} | {high_water_bytes:bytes}"
        " | {process_bytes:bytes} | {predicted_bytes:bytes} | {upper_bytes:bytes} | {seconds}"
        " | {difference?:.1e}",
        seconds=lambda row: figure("cpu_s", row["cpu_s"]),
    )


def attention(rows: Rows) -> str:
    """Modules alone, then training steps of networks with them."""
    return by_part(rows, {"modules": _modules, "networks": _networks})


def _modules(rows: Rows) -> str:
    return joined(
        *(
            tabled(
                [{"name": name, **one} for name, one in row["ways"].items()],
                "one module | peak | processor seconds | of linear's (range)",
                "{name} | {activations_bytes:bytes} | {cpu_s:median.3f} | {ratio:spread}",
            )
            for row in rows
        )
    )


def _networks(rows: Rows) -> str:
    return tabled(
        [
            {"attention": row["row"].removeprefix("networks, "), "way": way, **one}
            for row in rows
            for way, one in row["ways"].items()
        ],
        "network with | checkpointing | peak | saved | processor seconds | of none's",
        "{attention} attention | {way} | {activations_bytes:bytes} | {saved_percent:.0f %}"
        " | {cpu_s:median.2f} | {ratio:spread}",
    )


def steps(rows: Rows) -> str:
    """PSNR, time and repeatability by scheduler and number of steps."""
    return tabled(
        rows,
        "scheduler | steps | PSNR | processor seconds | runs agree | seeds differ by",
        "{scheduler} | {steps} | {psnr_db:.2f dB} | {cpu_s:.1f} | {agree} | {deviation:.2f of 255}",
        scheduler=lambda row: "any" if row["steps"] == 1 else f"`{row['scheduler']}`",
        agree=lambda row: "in every bit" if row["equal_bits"] else "no",
        deviation=lambda row: row["seed_deviation"] or None,
    )


def mri(rows: Rows) -> str:
    """What files keep, and tensors that are fitted to them after each method."""
    files = tabled(
        [row for row in rows if "shape" in row],
        "file, level | shape | header | from the exact result | clipped | level | peak",
        "{row} | {sides} | {header} | {largest_error_in_steps:.4f steps} | {clipped:,}"
        " | {sigma:.3g} | {peak_bytes:bytes}",
        sides=lambda row: "×".join(map(str, row["shape"])),
        header=lambda row: "equal in every bit" if row["header_equal"] else "differs",
    )
    fits = tabled(
        [row for row in rows if "finite" in row],
        "series, method | all finite | residual of the fit | mean FA | mean MD | roughness of FA"
        " | residual with the image | with its neighbors | seconds",
        "{row} | {finite:yes} | {fit_residual:.1f} | {fa_mean:.3f} | {md:.3f}e-3"
        " | {fa_roughness:.3f} | {removed} | {seconds:.1f}",
        md=lambda row: 1e3 * row["md_mean"],
        removed=lambda row: (
            filled(row["residual"], "{image_correlation:+.2f} | {neighbor_correlation:+.2f}")
            if row["residual"]
            else f"{NONE} | {NONE}"
        ),
    )
    return joined(files, fits)


def dwi(rows: Rows) -> str:
    """Errors of a series whose truth is known, by method."""
    return tabled(
        rows,
        "series, method | RMSE of b0 | of DWI | bias of FA | RMSE of FA | background"
        " | processor seconds",
        "{row} | {b0_rmse:.1f} | {dwi_rmse:.1f} | {fa_bias:+.3f} | {fa_rmse:.3f}"
        " | {background:.1f} | {cpu_s:.1f}",
    )


SHAPES = {
    "denoise": denoise,
    "denoise_pictures": pictures,
    "denoise_attention": attention,
    "denoise_steps": steps,
    "denoise_raw_noise": denoise_raw_noise,
    "denoise_large": denoise_large,
    "denoise_dwi": dwi,
    "denoise_mri": mri,
}
