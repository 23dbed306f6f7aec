"""Train ParagonSR2 nano for a few minutes, and draw what became of it.

    python scripts/demo_train.py            # what `make demo-train` runs

Photographs that ship inside scikit-image go to ``demo/training``, as files; the rest is `lowtide
train sr examples/train_nano.yml` as a function. ``demo/training/curves.png`` has the loss and the
scores, ``demo/training/before_after.png`` a detail of a photograph that was held out. Run again, it
goes on where it was.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyvips
from training_photographs import PHOTOS, TUNING, bicubic, photograph, scaled, shrink, write

import lowtide
from lowtide.cli.train import TrainProgressPrinter
from lowtide.jobs.upscale.train import TrainReport, train_sr
from lowtide.models.resample import resize_cubic
from lowtide.training.tasks.sr_config import SrConfig
from lowtide.training.train_log import read_log

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "examples" / "train_nano.yml"
FOLDER = Path("demo") / "training"
# Photographs are few, and smaller ones have other detail.
SIZES = (1.0, 0.7, 0.5)
# Of `camera`, top left corner and side, at the large size.
DETAIL = (70, 190, 128)


def write_photographs() -> None:
    """Photographs to train on and to hold out."""
    for names, folder, sizes in ((PHOTOS, "photos", SIZES), (TUNING, "held_out", (1.0,))):
        for name in names:
            for share in sizes:
                image = photograph(name) if share == 1 else scaled(photograph(name), share)
                write(FOLDER / folder / f"{name}_{len(image)}.png", image)


def draw_curves(report: TrainReport) -> Path:
    """The loss by step, and PSNR-Y of the held-out photographs."""
    import matplotlib.pyplot as plt

    rows = read_log(Path(report.folder))
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    losses = [row for row in rows if "l1loss" in row]
    left.plot([row["step"] for row in losses], [row["l1loss"] for row in losses])
    left.set(xlabel="step", ylabel="L1 loss", ylim=(0, None))
    scores = [row for row in rows if "psnr" in row]
    right.plot([row["step"] for row in scores], [row["psnr"] for row in scores], marker="o")
    right.axhline(cubic_score(), linestyle=":", label="cubic")
    right.set(xlabel="step", ylabel="PSNR-Y of held-out photographs, dB")
    right.legend()
    path = FOLDER / "curves.png"
    figure.savefig(path, dpi=120)
    return path


def cubic_score() -> float:
    """What cubic enlargement scores on the held-out photographs, PSNR-Y in dB."""
    return float(np.mean([bicubic(name, 2) for name in TUNING]))


def draw_before_after(report: TrainReport) -> Path:
    """A detail three times: cubic, the trained network, and the original."""
    low, high = shrink(photograph("camera"), 2)
    small, large = FOLDER / "camera_small.png", FOLDER / "camera_large.png"
    pyvips.Image.new_from_array(low).pngsave(str(small))
    lowtide.upscale(small, large, model=report.best_weights or report.weights, force=True)
    made = pyvips.Image.new_from_file(str(large)).numpy()
    top, left, side = DETAIL
    parts = [
        image[top : top + side, left : left + side].repeat(3, 0).repeat(3, 1)
        for image in (resize_cubic(low, *high.shape[:2]), made, high)
    ]
    path = FOLDER / "before_after.png"
    pyvips.Image.new_from_array(np.concatenate(parts, axis=1)).pngsave(str(path))
    return path


def main() -> None:
    """Write the photographs, train, draw, and say where everything is."""
    write_photographs()
    report = train_sr(
        SrConfig.from_file(CONFIG), FOLDER, on_plan=print, on_step=TrainProgressPrinter()
    )
    print(
        f"PSNR-Y {report.scores['psnr']:.2f} dB on held-out photographs, cubic"
        f" {cubic_score():.2f} dB; {report.parameters:,} parameters"
    )
    for path in (draw_curves(report), draw_before_after(report), report.best_weights):
        print(path)


if __name__ == "__main__":
    main()
