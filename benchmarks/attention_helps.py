"""Does attention help? ParagonSR2 ×2 trained without it, in windows and hierarchically.

    LOWTIDE_DATA=... python benchmarks/attention_helps.py [--steps 600] [--variants nano,s]
        [--seeds 0,1,2] [--attentions none,window] [--photos FOLDER] [--work FOLDER] [--only TEXT]
        [--fresh]

A row for each variant, attention and seed: equal steps by the project's own trainer, in a process
of its own, and PSNR-Y of Set5 after the last one, or of two photographs that are held out where
``images/set5`` is not in LOWTIDE_DATA. A seed draws the weights and the patches, so that runs of
one seed see the same patches. Trained on scikit-image's photographs, or on those of ``--photos``. A
run that was interrupted goes on in its folder (``demo/attention_helps`` by default).

Then a row for each variant and attention: the mean and the deviation, over seeds, of what it gains
over none, and how many times as many processor seconds training took.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from common import ResultFile, row_parser
from subprocess_run import measure_in_subprocess

sys.path.append(str(Path(__file__).parent.parent / "scripts"))

from training_photographs import PHOTOS, TUNING, photograph, write

from lowtide.jobs.upscale.train import train_sr
from lowtide.training.tasks.sr_config import SrConfig

SCALE = 2
VARIANTS = ("nano", "micro", "tiny", "xs", "s")
# What the others are compared with comes first.
ATTENTIONS = ("none", "window", "hierarchical")
# A patch holds several windows of 32 pixels that share 8.
PATCH, BATCH, RATE, WARMUP = 48, 8, 2e-3, 100
STEPS = 600


def run_of(variant: str, attention: str, seed: int, steps: int) -> str:
    """The name of a run, for its row and its folder."""
    return f"{variant}, {attention}, {steps} steps, seed {seed}"


def config_of(
    variant: str, attention: str, seed: int, steps: int, data: dict[str, Any]
) -> dict[str, Any]:
    """A configuration in the trainer's terms; ``data`` has its pictures."""
    return {
        "name": run_of(variant, attention, seed, steps).replace(", ", "-").replace(" ", "_"),
        "scale": SCALE,
        "manual_seed": seed,
        "datasets": {
            "train": {
                "lq_size": PATCH,
                "batch_size_per_gpu": BATCH,
                "color": True,
                **data["train"],
            },
            "val": data["val"],
        },
        "network_g": {"type": f"paragonsr2_{variant}", "attention": attention},
        "train": {
            "total_iter": steps,
            "warmup_iter": min(WARMUP, steps // 10),
            "optim_g": {"type": "adamw", "lr": RATE},
            "losses": [{"type": "l1loss"}],
        },
        "val": {"val_freq": steps, "metrics": {"psnr": {"type": "psnr"}}},
        "logger": {"print_freq": 100, "save_checkpoint_freq": 500},
    }


def train(config: dict[str, Any], work: str) -> dict[str, Any]:
    """One training, from where it was."""
    moments: list[float] = []  # from the plan to the last step: validation is no training

    def look(_: object) -> None:
        moments.append(time.process_time())

    report = train_sr(SrConfig.from_values(config), work, device="cpu", on_plan=look, on_step=look)
    return {
        "cpu_s": round(moments[-1] - moments[0], 2),
        "psnr_y_db": report.scores["psnr"],
        "parameters": report.parameters,
        "resumed_at": report.resumed_step,
        "predicted_bytes": report.plan.predicted_bytes,
    }


def pictures(photos: Path | None, work: Path) -> dict[str, Any]:
    """Folders to train on and to validate with, and what the latter are called."""
    held_out, own = work / "held_out", work / "photos"
    if photos is None:
        write_photographs(own, held_out)
    found: dict[str, Any] = {"train": {"dataroot_gt": str(photos or own)}}
    set5 = Path(os.environ.get("LOWTIDE_DATA", "")) / "images" / "set5"
    if "LOWTIDE_DATA" in os.environ and set5.is_dir():
        found["judged_on"] = "Set5"
        found["val"] = {
            "dataroot_gt": str(set5 / "HR"),
            "dataroot_lq": str(set5 / "LR_bicubic" / f"X{SCALE}"),
            "filename_tmpl": f"{{}}x{SCALE}",
        }
        return found
    if photos is not None:
        raise SystemExit("--photos needs Set5 in LOWTIDE_DATA: none of the photographs is held out")
    return {**found, "judged_on": "held-out photographs", "val": {"dataroot_gt": str(held_out)}}


def write_photographs(own: Path, held_out: Path) -> None:
    """scikit-image's photographs as files."""
    for names, folder in ((PHOTOS, own), (TUNING, held_out)):
        for name in names:
            write(folder / f"{name}.png", photograph(name))


def measure(results: ResultFile, options: argparse.Namespace) -> None:
    """The runs that are missing; a seed of all of them before the next one."""
    data = pictures(options.photos, options.work)
    for seed in options.seeds:
        for variant in options.variants:
            for attention in options.attentions:
                row = run_of(variant, attention, seed, options.steps)
                if options.only not in row or results.has(row):
                    continue
                config = config_of(variant, attention, seed, options.steps, data)
                usage = measure_in_subprocess("attention_helps:train", config, str(options.work))
                results.add(
                    row,
                    variant=variant,
                    attention=attention,
                    seed=seed,
                    steps=options.steps,
                    judged_on=data["judged_on"],
                    peak_bytes=usage.peak_bytes,
                    threads=torch.get_num_threads(),
                    **usage.result,
                )


def sum_up(results: ResultFile, steps: int) -> None:
    """The rows that compare, made anew of all seeds that there are."""
    rows = results.data["rows"]
    rows[:] = [row for row in rows if "gain_db" not in row or row["steps"] != steps]
    runs = [row for row in rows if "psnr_y_db" in row and row["steps"] == steps]
    for variant in dict.fromkeys(row["variant"] for row in runs):
        mine = [row for row in runs if row["variant"] == variant]
        base = {row["seed"]: row for row in mine if row["attention"] == ATTENTIONS[0]}
        for attention in ATTENTIONS[1:]:
            pairs = [
                (row, base[row["seed"]])
                for row in mine
                if row["attention"] == attention and row["seed"] in base
            ]
            if pairs:
                title = f"{variant}, {attention} against {ATTENTIONS[0]}, {steps} steps"
                results.add(title, steps=steps, **gained(pairs))


def gained(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    """What runs gain over those of the same seeds; no deviation of a single one. Time is only
    compared where neither run was interrupted, and both are of one machine."""
    gains = [one["psnr_y_db"] - other["psnr_y_db"] for one, other in pairs]
    whole = [
        one["cpu_s"] / other["cpu_s"]
        for one, other in pairs
        if not one["resumed_at"]
        and not other["resumed_at"]
        and one.get("environment") == other.get("environment")
    ]
    return {
        "seeds": len(gains),
        "gain_db": round(statistics.mean(gains), 4),
        "deviation_db": round(statistics.stdev(gains), 4) if len(gains) > 1 else None,
        "gains_db": [round(gain, 4) for gain in gains],
        "cpu_ratio": round(statistics.median(whole), 3) if whole else None,
    }


def listed(known: tuple[str, ...]) -> Any:
    """A parser of some of these, with commas between."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        if unknown := sorted(set(names) - set(known)):
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: there are {', '.join(known)}")
        return names

    return parse


def main() -> None:
    """Train what is missing, and compare."""
    parser = row_parser(__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--variants", type=listed(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--attentions", type=listed(ATTENTIONS), default=list(ATTENTIONS))
    parser.add_argument(
        "--seeds", default=[0, 1, 2], type=lambda text: [int(seed) for seed in text.split(",")]
    )
    parser.add_argument("--photos", type=Path, help="a folder to train on")
    parser.add_argument("--work", type=Path, default=Path("demo") / "attention_helps")
    options = parser.parse_args()
    results = ResultFile(
        "attention_helps",
        fresh=options.fresh,
        packages=("accelerate", "scikit-image"),
        about="ParagonSR2 ×2 with and without attention, trained alike: PSNR-Y.",
        environments="any",  # many hours; what is compared is decibels
    )
    measure(results, options)
    sum_up(results, options.steps)


if __name__ == "__main__":
    main()
