"""Exports to ONNX against their models: difference, bytes and processor seconds.

    python benchmarks/onnx_files.py [--only TEXT] [--pairs 5] [--fresh]

A row for each ParagonSR2 at ×2 and ×4, with fixed random weights and attention in windows where
it has one, and for each bundled model, in fp32 and in 8 bits. Differences are the export's own
check, at sizes that were not exported; for 8 bits they are on photographs that the file was not
tuned on. Times: processor seconds of one picture of 128×128 pixels by ONNX Runtime and by PyTorch
in one process, in turns, with as many threads as OMP_NUM_THREADS says; the first round warms up.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import paragonsr2_runs as runs
import pyvips
import torch
from common import HEAP_KEEPS, ResultFile, ratio_of, row_parser, seconds_in_turns
from photographs import EXAMPLE
from safetensors.torch import save_file
from subprocess_run import measure_in_subprocess

import lowtide
from lowtide.jobs.export.command import export_onnx
from lowtide.jobs.export.report import FilePrecision
from lowtide.models import lowtide_files
from lowtide.models.export import OnnxRunner
from lowtide.models.paragonsr2.config import VariantConfig

SIDE = 128
SCALES = (2, 4)
BUNDLED: tuple[tuple[str, FilePrecision], ...] = tuple(
    (name, precision)
    for name in ("lowtide-x2", "lowtide-x4", "lowtide-large-x2", "lowtide-large-x4")
    for precision in ("fp32", "int8")
)
# Photographs for 8 bits: number of crops of the example.
_CROPS = 6
# PyTorch's threads would wait in a loop while the others work.
_TIMED = HEAP_KEEPS | {"OMP_WAIT_POLICY": "passive"}


def saved(name: str, scale: int, folder: Path) -> Path:
    """A ParagonSR2 as a file of the format that it has."""
    attention = runs.attentions(name)[0]
    weights = runs.network(name, scale, attention).state_dict()
    config = runs.config_of(name, scale, attention)
    if isinstance(config, VariantConfig):
        path = folder / f"{name}.safetensors"
        save_file(dict(weights), path, lowtide_files.metadata_for(config))
    else:
        path = folder / f"{name}.pth"
        torch.save(weights, path)
    return path


def photographs(folder: Path) -> Path:
    """A folder of pieces of the example."""
    whole = pyvips.Image.new_from_file(str(EXAMPLE)).copy_memory()
    folder.mkdir()
    width, height = whole.width // (_CROPS // 2), whole.height // 2
    for place in range(_CROPS):
        piece = whole.crop(place // 2 * width, place % 2 * height, width, height)
        piece.write_to_file(str(folder / f"{place}.png"))
    return folder


def run_times(model: str, path: str, pairs: int) -> dict[str, Any]:
    """Processor seconds of both, in turns."""
    network, run = lowtide.load(model).module, OnnxRunner(path)
    image = runs.image_of(SIDE)
    ways = {"ONNX Runtime": lambda: run(image), "PyTorch": lambda: network(image)}
    with torch.inference_mode():
        seconds = seconds_in_turns(ways, pairs)
    return {
        "cpu_s": seconds,
        "threads": torch.get_num_threads(),
        "ratio": ratio_of(seconds["ONNX Runtime"], seconds["PyTorch"]),
    }


def measured(model: str, scale: int, precision: FilePrecision, pairs: int) -> dict[str, Any]:
    """The export's own figures, and the times."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        name = model if model.startswith("lowtide") else str(saved(model, scale, folder))
        photos = [photographs(folder / "photographs")] if precision == "int8" else []
        path = folder / "model.onnx"
        report = export_onnx(name, path, precision=precision, calibrate=photos)
        timed = measure_in_subprocess("onnx_files:run_times", name, str(path), pairs, env=_TIMED)
    decibels = [one.psnr_db for one in report.sizes if one.psnr_db is not None]
    return {
        "model": model,
        "scale": scale,
        "precision": precision,
        "parameters": report.parameters,
        "bytes": report.file_bytes,
        "sizes": [f"{one.width}×{one.height}" for one in report.sizes],
        "max_difference": max(one.difference for one in report.sizes),
        "least_db": min(decibels) if decibels else None,
        "side": SIDE,
        **timed.result,
    }


def main() -> None:
    """Measure what is missing."""
    options = row_parser(__doc__, pairs=5).parse_args()
    results = ResultFile(
        "onnx_files",
        fresh=options.fresh,
        packages=("onnx", "onnxruntime", "onnxscript"),
        about="Exports to ONNX: difference from PyTorch, bytes, and processor seconds of both.",
    )
    wanted: list[tuple[str, int, FilePrecision]] = [
        (model, int(model[-1]), precision) for model, precision in BUNDLED
    ]
    wanted += [(name, scale, "fp32") for name in runs.NAMES for scale in SCALES]
    for model, scale, precision in wanted:
        row = f"{model}, {precision}" if model.startswith("lowtide") else f"{model} x{scale}"
        if options.only in row and not results.has(row):
            results.add(row, **measured(model, scale, precision, options.pairs))


if __name__ == "__main__":
    main()
