"""What the rows of the GPU report are measured by: functions of a `StatePlace`.

All but `reserved` and `gpu_tests` also run on a processor.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree

import large_images
import tile_loop
import torch
from common import in_turns, spread
from gpu_cases import Case, with_peak
from photographs import as_array, photograph
from streaming_gpu import SHARES

import lowtide
from lowtide.jobs.images.report import ImageReport

ROOT = Path(__file__).parent.parent
Figures = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """Where rows are measured; ``tiny``: pictures of a few pixels, each way once."""

    device: str
    tiny: bool = False

    @property
    def on_gpu(self) -> bool:
        """Whether it is a CUDA device."""
        return self.device != "cpu"


def device_facts(place: Place) -> Figures:
    """What the environment of a result file does not say of the GPU."""
    if not place.on_gpu:
        return {"device": place.device, "threads": torch.get_num_threads()}
    facts = torch.cuda.get_device_properties(place.device)
    return {
        "device": facts.name,
        "count": torch.cuda.device_count(),
        "memory_bytes": facts.total_memory,
        "capability": list(torch.cuda.get_device_capability(place.device)),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "driver": _driver(),
    }


def _driver() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()[0]


def compare_tile_loops(place: Place) -> Figures:
    """`tile_loop`, with fewer turns than its own benchmark takes."""
    size, pairs = ((48, 32), 1) if place.tiny else (tile_loop.SIZE, 2)
    runs, difference = tile_loop.measure(place.device, pairs, size)
    ways = {
        side: {
            name: tile_loop.middle(done, name)
            for name in tile_loop.FIGURES
            if done[0][name] is not None
        }
        for side, done in runs.items()
    }
    ratios = tile_loop.ratios(runs["lowtide"], runs["tile_loop"])
    return {"pairs": pairs, "ways": ways, **ratios, "largest_difference_of_255": difference}


def large_image(size: str) -> Callable[[Place], Figures]:
    """One of `large_images`."""

    def measure(place: Place) -> Figures:
        pixels = (96, 64) if place.tiny else large_images.SIZES[size]
        return large_images.measure(*pixels, place.device, "1GiB")

    return measure


def ways_of(ways: Mapping[str, Figures]) -> Callable[[Place], Figures]:
    """A photograph upscaled in several ways, in turns; the first is what others are compared with.

    A way is settings of `lowtide.upscale`; ``devices`` stands for two of the place's. Also says
    whether each stays within what its plan promised.
    """

    def measure(place: Place) -> Figures:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            source = photograph(folder / "photo.png", *((48, 40) if place.tiny else tile_loop.SIZE))
            images: dict[str, list[ImageReport]] = {way: [] for way in ways}
            for turn, way in in_turns(ways, 2 if place.tiny else 4):
                image = _upscaled(source, folder / f"{way}.png", place, ways[way])
                if turn:  # the first one measures the model's costs
                    images[way].append(image)
            first, *others = (as_array(folder / f"{way}.png").astype(int) for way in ways)
            found = {way: _figures(done) for way, done in images.items()}
            for way, pixels in zip(list(ways)[1:], others, strict=True):
                found[way]["largest_difference_of_255"] = int(abs(pixels - first).max())
        return {"ways": found}

    return measure


def _upscaled(source: Path, target: Path, place: Place, way: Figures) -> ImageReport:
    settings = {"device": place.device, "model": tile_loop.MODEL} | way
    if settings.get("devices"):
        devices = ("cuda:0", "cuda:1") if place.on_gpu else ("cpu", "cpu")
        settings |= {"device": "auto", "devices": devices}
    if place.tiny and "tile" in settings:
        settings["tile"] = 32
    return lowtide.upscale(source, target, force=True, **settings).images[0]


def _figures(images: list[ImageReport]) -> Figures:
    """Those of one way."""
    image = images[-1]
    assert image.plan is not None
    assert image.memory is not None
    assert image.accuracy is not None
    error = image.accuracy.precision_error
    return {
        "plan": image.plan.title,
        "wall_s": spread([one.seconds for one in images]),
        "predicted_bytes": image.memory.predicted_bytes,
        "upper_bytes": image.memory.upper_bytes,
        "peak_bytes": image.memory.peak_bytes,
        "within_upper": image.memory.peak_bytes <= image.memory.upper_bytes,
        "precision": image.accuracy.precision,
        "psnr_db": error and error.psnr_db,
        "notes": images[0].notes,
        "events": image.events,
    }


def reserved(
    direction: str, side: int, precision: str, pages: Literal["auto", "host"]
) -> Callable[[Place], Figures]:
    """Predicted peak of a streamed autoencoder, and the bytes the allocator reserved."""

    def measure(place: Place) -> Figures:
        case = Case(direction, side, precision, pages)
        whole, found, _ = with_peak(case.whole)
        total = torch.cuda.get_device_properties(0).total_memory
        budget = int(SHARES[pages] * (total if whole is None else found))
        del whole
        torch.cuda.empty_cache()
        run, plan, predicted = case.streamed(budget)
        result, peak, taken = with_peak(run)
        assert result is not None, "streamed, it is out of memory"
        return {
            "plan": plan,
            "budget_bytes": budget,
            "told_bytes": predicted,
            "reserved_bytes": taken,
            "reserved_ratio": round(taken / predicted, 3),
            "peak_bytes": peak,
        }

    return measure


_TRAINING = {
    "scale": 2,
    "network_g": {"type": "paragonsr2_nano", "window": 8, "shared": 2},
    "train": {"total_iter": 4, "losses": [{"type": "l1loss"}]},
    "logger": {"print_freq": 1},
}


def training_by_two(place: Place) -> Figures:
    """Losses of two processes with half a batch each, and of one with all of it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "photos").mkdir()
        photograph(folder / "photos" / "photo.png", 192, 192)
        losses = {
            way: _losses(place, folder, way, batch, processes)
            for way, batch, processes in (("one", 4, 1), ("two", 2, 2))
        }
    differences = [abs(a - b) / abs(a) for a, b in zip(*losses.values(), strict=True)]
    return {"losses": losses, "largest_relative_difference": max(differences)}


def _losses(place: Place, folder: Path, name: str, batch: int, processes: int) -> list[float]:
    data = {"dataroot_gt": str(folder / "photos"), "lq_size": 16, "batch_size_per_gpu": batch}
    config = folder / f"{name}.yml"  # JSON is YAML
    config.write_text(json.dumps({"name": name, "datasets": {"train": data}} | _TRAINING))
    many = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m"]
    command = [sys.executable, "-m", *(many if processes > 1 else []), "lowtide", "train", "sr"]
    command += [str(config), "-o", str(folder), "--budget", "2GiB"]
    command += [] if place.on_gpu else ["--device", "cpu"]
    subprocess.run(command, check=True, capture_output=True, text=True)
    log = (folder / name / "log.jsonl").read_text().splitlines()
    return [json.loads(line)["l1loss"] for line in log]


def gpu_tests(place: Place) -> Figures:
    """How many of the tests that need a GPU pass, and what the others say."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "tests.xml"
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider"]
        command += ["--junitxml", str(report), str(ROOT / "tests")]
        subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False)
        cases = ElementTree.parse(report).getroot().findall(".//testcase")
    failed = {
        f"{case.get('classname')}.{case.get('name')}": (found.get("message") or "")[:400]
        for case in cases
        for found in (*case.findall("failure"), *case.findall("error"))
    }
    skipped = sum(case.find("skipped") is not None for case in cases)
    error = {"error": f"{len(failed)} tests failed", "failed": failed} if failed else {}
    return {"passed": len(cases) - len(failed) - skipped, "skipped": skipped, **error}
