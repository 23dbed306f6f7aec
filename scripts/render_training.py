"""The tables of training and of exports, for ``render_results.py``."""

from __future__ import annotations

from collections import defaultdict
from statistics import mean, median
from typing import Any

from tables import Rows, spread, table

from lowtide.core.units import format_bytes


def training_memory(rows: Rows) -> str:
    """Predictions, then what checkpointing saves, then validation."""
    parts = [
        (_predicted, [row for row in rows if row["part"] == "prediction"]),
        (checkpointed, [row for row in rows if row["part"] == "checkpointing"]),
        (_validated, [row for row in rows if row["part"] == "validation"]),
    ]
    return "\n\n".join(shape(part) for shape, part in parts if part)


def _predicted(rows: Rows) -> str:
    head = ["configuration", "patches", "expected", "at most", "measured", "error", "within"]
    return table(
        head,
        [
            [
                _name(row),
                f"{row['batch']} of {row['patch']} px",
                *(format_bytes(row[f"{name}_bytes"]) for name in ("predicted", "upper", "peak")),
                f"{row['error_percent']:+.1f} %",
                "yes" if row["within_bound"] else "no",
            ]
            for row in rows
        ],
    )


def checkpointed(rows: Rows) -> str:
    """Each network with each way of checkpointing: memory, time and difference."""
    head = [
        "network",
        "checkpointing",
        "of a step, beyond what stays",
        "saved",
        "processor seconds, of none's (range)",
        "largest difference of weights",
    ]
    lines: list[list[str]] = []
    for row in rows:
        if "refused" in row:
            lines.append([_name(row), f"refused: {row['refused']}", *4 * ["–"]])
            continue
        for way in ("none", "selective", "full"):
            one, ratio = row[way], row[way]["ratio"]
            lines.append(
                [
                    _name(row),
                    way,
                    format_bytes(one["activations_bytes"]),
                    f"{one['saved_percent']:.0f} %",
                    spread(ratio),
                    f"{one['max_weight_difference']:.1e}",
                ]
            )
    return table(head, lines)


def _validated(rows: Rows) -> str:
    head = ["image of 2 megapixels", "budget", "peak", "PSNR-Y", "of the whole's"]
    return table(
        head,
        [
            [
                _name(row),
                format_bytes(row["budget_bytes"]) if "budget_bytes" in row else "–",
                format_bytes(row["peak_bytes"]),
                f"{row['psnr_db']:.3f} dB",
                f"{row['psnr_difference_db']:+.1e} dB" if "psnr_difference_db" in row else "–",
            ]
            for row in rows
        ],
    )


def onnx_files(rows: Rows) -> str:
    """Differences, bytes, and times relative to PyTorch's."""
    head = [
        "model",
        "parameters",
        "file",
        "largest difference",
        "on photographs, at least",
        "ONNX Runtime",
        "PyTorch",
        "ratio (range)",
    ]
    lines = []
    for row in rows:
        ratio, seconds = row["ratio"], row["cpu_s"]
        decibels = f"{row['least_db']:.1f} dB" if row["least_db"] else "–"
        lines.append(
            [
                row["row"],
                f"{row['parameters']:,}",
                format_bytes(row["bytes"]),
                f"{row['max_difference']:.1e}",
                decibels,
                *(f"{median(seconds[way]):.3f} s" for way in ("ONNX Runtime", "PyTorch")),
                spread(ratio),
            ]
        )
    return table(head, lines)


def adversarial(rows: Rows) -> str:
    """Losses in the beginning and in the end, then what each branch adds."""
    names = ("l1loss", "gan", "discriminator")
    head = [
        "training",
        *(f"{name}, first and last 10 steps" for name in names),
        "all finite",
        "processor seconds",
    ]
    losses = table(
        head,
        [
            [
                row["row"],
                *(f"{row['losses'][0][name]:.4f}, {row['losses'][-1][name]:.4f}" for name in names),
                "yes" if row["finite"] else "no",
                f"{row['cpu_s']:.0f}",
            ]
            for row in rows
        ],
    )
    branches = list(rows[0]["without_branch"]["before"])
    head = ["change of the generator's gradient without", *branches]
    changes = table(
        head,
        [
            [
                f"{row['kind']}, {when} training",
                *(f"{row['without_branch'][when][name]:.1%}" for name in branches),
            ]
            for row in rows
            for when in ("before", "after")
        ],
    )
    return f"{losses}\n\n{changes}"


def attention_helps(rows: Rows) -> str:
    """What each attention gains over none, seed by seed, and what it costs."""
    head = [
        "variant, and attention",
        "PSNR-Y, mean",
        "gain (deviation)",
        "of each seed",
        "seeds",
        "processor seconds, of none's",
    ]
    scores: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for row in rows:
        if "psnr_y_db" in row:
            scores[row["variant"], row["attention"], row["steps"]].append(row["psnr_y_db"])
    gains = {row["row"]: row for row in rows if "gain_db" in row}
    lines = []
    for (variant, way, steps), found in scores.items():
        cells = [f"{variant}, {way}, {steps} steps", f"{mean(found):.3f} dB"]
        gain = gains.get(f"{variant}, {way} against none, {steps} steps")
        lines.append([*cells, *(_gained(gain) if gain else ["–", "–", str(len(found)), "–"])])
    return table(head, lines)


def _gained(row: dict[str, Any]) -> list[str]:
    spread = "–" if row["deviation_db"] is None else f"{row['deviation_db']:.3f}"
    ratio = "–" if row["cpu_ratio"] is None else f"{row['cpu_ratio']:.2f}"
    each = ", ".join(f"{gain:+.3f}" for gain in row["gains_db"])
    return [f"{row['gain_db']:+.3f} dB ({spread})", each, str(row["seeds"]), ratio]


def bundled(rows: Rows) -> str:
    """Images against cubic upscaling, then networks of similar size."""
    scored = [row for row in rows if "pictures_db" in row]
    pictures = list(scored[0]["pictures_db"]) if scored else []
    lines = [
        [
            f"{row['model']} (cubic)",
            *(
                f"{row['pictures_db'][name]:.2f} ({row['cubic_db'][name]:.2f}) dB"
                for name in pictures
            ),
            "yes" if row["above_cubic_on_all"] else "**no**",
        ]
        for row in scored
    ]
    scores = table(["enlarged by", *pictures, "above cubic on all"], lines)
    parts = [scores, _stored(scored), *(_speed(row) for row in rows if "cpu_s" in row)]
    return "\n\n".join(part for part in parts if part)


def _stored(rows: Rows) -> str:
    """What a picture scores with its pixels doubled, as its file has them."""
    said = [
        f"{name} by {row['model']} {own:.2f} ({cubic:.2f}) dB"
        for row in rows
        for name, (own, cubic) in row.get("as_stored_db", {}).items()
    ]
    return f"With each pixel twice, as in its file: {', '.join(said)}." if said else ""


def _speed(row: dict[str, Any]) -> str:
    """Networks of one scale."""
    head = [
        f"×{row['scale']} of {row['side']}²: network",
        "weights",
        "peak",
        "processor seconds",
        "of the larger model's (range)",
    ]
    return table(
        head,
        [
            [
                name,
                f"{row['parameters'][name]:,}",
                format_bytes(row["peak_bytes"][name]),
                f"{median(taken):.3f}",
                spread(row["ratio"][name]),
            ]
            for name, taken in row["cpu_s"].items()
        ],
    )


def _name(row: dict[str, Any]) -> str:
    return row["row"].partition(", ")[2]


SHAPES = {
    "training_memory": training_memory,
    "onnx_files": onnx_files,
    "adversarial": adversarial,
    "bundled": bundled,
    "attention_helps": attention_helps,
}
