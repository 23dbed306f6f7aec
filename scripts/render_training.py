"""The tables of training and of exports, for ``render_results.py``."""

from __future__ import annotations

from collections import defaultdict
from statistics import mean, median

from tables import NONE, Row, Rows, by_part, filled, joined, table, tabled

from lowtide.core.units import format_bytes


def training_memory(rows: Rows) -> str:
    """Predictions, then what checkpointing saves, then validation."""
    parts = {"prediction": _predicted, "checkpointing": checkpointed, "validation": _validated}
    return by_part(rows, parts)


def _predicted(rows: Rows) -> str:
    return tabled(
        rows,
        "configuration | patches | expected | at most | measured | error | within",
        "{name} | {batch} of {patch} px | {predicted_bytes:bytes} | {upper_bytes:bytes}"
        " | {peak_bytes:bytes} | {error_percent:+.1f %} | {within_bound:yes}",
        name=_name,
    )


def checkpointed(rows: Rows) -> str:
    """Each network with each way of checkpointing: memory, time and difference."""
    lines: list[str] = []
    for row in rows:
        if "refused" in row:
            lines.append(f"{_name(row)} | refused: {row['refused']}{4 * f' | {NONE}'}")
            continue
        lines += [
            f"{_name(row)} | {way} | "
            + filled(
                row[way],
                "{activations_bytes:bytes} | {saved_percent:.0f %} | {ratio:spread}"
                " | {max_weight_difference:.1e}",
            )
            for way in ("none", "selective", "full")
        ]
    return table(
        "network | checkpointing | of a step, beyond what stays | saved"
        " | processor seconds, of none's (range) | largest difference of weights",
        lines,
    )


def _validated(rows: Rows) -> str:
    return tabled(
        rows,
        "image of 2 megapixels | budget | peak | PSNR-Y | of the whole's",
        "{name} | {budget_bytes?:bytes} | {peak_bytes:bytes} | {psnr_db:.3f dB}"
        " | {psnr_difference_db?:+.1e dB}",
        name=_name,
    )


def onnx_files(rows: Rows) -> str:
    """Differences, bytes, and times relative to PyTorch's."""
    return tabled(
        rows,
        "model | parameters | file | largest difference | on photographs, at least | ONNX Runtime"
        " | PyTorch | ratio (range)",
        "{row} | {parameters:,} | {bytes:bytes} | {max_difference:.1e} | {least_db:.1f dB}"
        " | {cpu_s[ONNX Runtime]:median.3f s} | {cpu_s[PyTorch]:median.3f s} | {ratio:spread}",
    )


def adversarial(rows: Rows) -> str:
    """Losses in the beginning and in the end, then what each branch adds."""
    names = ("l1loss", "gan", "discriminator")

    def losses(row: Row) -> str:
        first, last = row["losses"][0], row["losses"][-1]
        return " | ".join(f"{first[name]:.4f}, {last[name]:.4f}" for name in names)

    heads = " | ".join(f"{name}, first and last 10 steps" for name in names)
    trainings = tabled(
        rows,
        f"training | {heads} | all finite | processor seconds",
        "{row} | {losses} | {finite:yes} | {cpu_s:.0f}",
        losses=losses,
    )
    changes = tabled(
        [
            {"kind": row["kind"], "when": when, "shares": row["without_branch"][when].values()}
            for row in rows
            for when in ("before", "after")
        ],
        " | ".join(
            ["change of the generator's gradient without", *rows[0]["without_branch"]["before"]]
        ),
        "{kind}, {when} training | {each}",
        each=lambda row: " | ".join(f"{share:.1%}" for share in row["shares"]),
    )
    return joined(trainings, changes)


def attention_helps(rows: Rows) -> str:
    """What each attention gains over none, seed by seed, and what it costs."""
    scores: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for row in rows:
        if "psnr_y_db" in row:
            scores[row["variant"], row["attention"], row["steps"]].append(row["psnr_y_db"])
    gains = {row["row"]: row for row in rows if "gain_db" in row}
    lines = []
    for (variant, way, steps), found in scores.items():
        gain = gains.get(f"{variant}, {way} against none, {steps} steps")
        gained = _gained(gain) if gain else f"{NONE} | {NONE} | {len(found)} | {NONE}"
        lines.append(f"{variant}, {way}, {steps} steps | {mean(found):.3f} dB | {gained}")
    return table(
        "variant, and attention | PSNR-Y, mean | gain (deviation) | of each seed | seeds"
        " | processor seconds, of none's",
        lines,
    )


def _gained(row: Row) -> str:
    each = ", ".join(f"{gain:+.3f}" for gain in row["gains_db"])
    return filled(
        row,
        f"{{gain_db:+.3f dB}} ({{deviation_db:.3f}}) | {each} | {{seeds}} | {{cpu_ratio:.2f}}",
    )


def bundled(rows: Rows) -> str:
    """Images against cubic upscaling, then networks of similar size."""
    scored = [row for row in rows if "pictures_db" in row]
    pictures = list(scored[0]["pictures_db"]) if scored else []
    scores = tabled(
        scored,
        " | ".join(["enlarged by", *pictures, "above cubic on all"]),
        "{model} (cubic) | {each} | {above_cubic_on_all:yes!}",
        each=lambda row: " | ".join(
            f"{row['pictures_db'][name]:.2f} ({row['cubic_db'][name]:.2f}) dB" for name in pictures
        ),
    )
    return joined(scores, _stored(scored), *(_speed(row) for row in rows if "cpu_s" in row))


def _stored(rows: Rows) -> str:
    """What a picture scores with its pixels doubled, as its file has them."""
    said = [
        f"{name} by {row['model']} {own:.2f} ({cubic:.2f}) dB"
        for row in rows
        for name, (own, cubic) in row.get("as_stored_db", {}).items()
    ]
    return f"With each pixel twice, as in its file: {', '.join(said)}." if said else ""


def _speed(row: Row) -> str:
    """Networks of one scale."""
    figures = ("parameters", "peak_bytes", "cpu_s", "ratio")
    return tabled(
        [{"name": name} | {one: row[one][name] for one in figures} for name in row["cpu_s"]],
        f"×{row['scale']} of {row['side']}²: network | weights | peak | processor seconds"
        " | of the larger model's (range)",
        "{name} | {parameters:,} | {peak_bytes:bytes} | {cpu_s:median.3f} | {ratio:spread}",
    )


def ldm4ts_memory(rows: Rows) -> str:
    """Presets of LDM4TS for GPUs, then what was measured on the CPU."""
    shapes = {
        "presets": _presets,
        "prediction": _ldm4ts_predicted,
        "checkpointing": _ldm4ts_checkpointed,
        "sampling": _sampled,
    }
    return by_part(rows, shapes)


def ldm4ts_estimates(rows: Rows) -> str:
    """What a training step is estimated to take, by weights, backend and checkpointing."""

    def found(row: Row) -> str:
        if "refused" in row:
            return f"refused: {row['refused']} | {NONE} | {NONE}"
        return filled(
            row,
            "{total_estimated_gb:.2f GB} | {total_upper_gb:.2f GB}"
            " | {savings_vs_default_pct:.0f %}",
        )

    estimates = tabled(
        rows,
        "weights | backend | checkpointing | expected | at most | saved, of default | claimed",
        "{parameters:,} | `{backend}` | {checkpointing:yes} | {found} | {claimed}",
        found=found,
        claimed=lambda row: f"{row['claimed_gb']} GB" if row["claimed_gb"] else NONE,
    )
    return (
        f"`estimate_vram_usage` for {rows[0]['batch']} images of 224×224 in bf16 on an RTX 3060,"
        " attention at all levels (784, 196 and 49 pixels), predicted and not measured. `math`"
        " holds whole score matrices. Claimed is what a guide to another implementation says of"
        f" such trainings, whose network is not stated:\n\n{estimates}"
    )


def _presets(rows: Rows) -> str:
    presets = tabled(
        rows,
        "GPU | free for training | checkpointing | largest batch | expected | at most",
        "{card} | {budget_bytes:bytes} | {checkpointing} | {batch:,} | {predicted_bytes:bytes}"
        " | {upper_bytes:bytes}",
    )
    return (
        "The largest batch, of powers of two, of images of 224×224 in fp32 with an EMA whose bound"
        f" fits, predicted and not measured:\n\n{presets}"
    )


def _ldm4ts_predicted(rows: Rows) -> str:
    def off(name: str) -> float:
        return median(abs(row[name]) for row in rows)

    steps = tabled(
        rows,
        "images | batch | backend | checkpointing | expected | at most | measured | error"
        " | tensors alone: expected | measured | error",
        "{side}×{side} | {batch} | `{backend}` | {checkpointing} | {predicted_bytes:bytes}"
        " | {upper_bytes:bytes} | {peak_bytes:bytes} | {error_percent:+.1f %}"
        " | {predicted_tensor_bytes:bytes} | {tensor_bytes:bytes} | {tensor_error_percent:+.1f %}",
    )
    within = sum(row["within_bound"] for row in rows)
    return (
        "Training steps on the CPU, as `lowtide train forecast` predicts them and as its trainer"
        f" takes them:\n\n{steps}\n\n"
        f"The median error is {off('error_percent'):.1f} % of resident memory and"
        f" {off('tensor_error_percent'):.1f} % of tensors; {within} of {len(rows)} peaks"
        " are within the bound. On GPUs: not measured."
    )


def _ldm4ts_checkpointed(rows: Rows) -> str:
    return f"A step with and without checkpointing, on the CPU:\n\n{checkpointed(rows)}"


def _sampled(rows: Rows) -> str:
    counts = list(rows[0]["peak_bytes"])
    samples = tabled(
        rows,
        f"images | {' | '.join(f'{count} samples' for count in counts)} | from fewest to most",
        "{images} | {peaks} | {growth_percent:+.1f %}",
        images=lambda row: _name(row).replace(" px", f"×{row['row'].split()[1]}"),
        peaks=lambda row: " | ".join(map(format_bytes, row["peak_bytes"].values())),
    )
    return f"Drawing samples of a window, less the samples themselves:\n\n{samples}"


def _name(row: Row) -> str:
    return row["row"].partition(", ")[2]


SHAPES = {
    "training_memory": training_memory,
    "onnx_files": onnx_files,
    "adversarial": adversarial,
    "bundled": bundled,
    "attention_helps": attention_helps,
    "ldm4ts_estimates": ldm4ts_estimates,
    "ldm4ts_memory": ldm4ts_memory,
}
