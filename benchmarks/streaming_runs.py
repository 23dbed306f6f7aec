"""What the streaming benchmark runs in processes of their own: whole, in bands, in tiles."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from common import in_turns
from streaming_models import given, made
from torch import Tensor

from lowtide.streaming.api import Streamed
from lowtide.streaming.engine.placement import PagePlacement

# The tiles of diffusers: at this size or larger, or it does not tile at all.
TILE = 256
# One value in this many has a larger difference than the reported tail.
TAIL = 100_000
MEMORY, DISK = "streamed, pages in memory", "streamed, pages on disk"
# As many in memory as fit in the same budget.
PARTLY = "streamed, pages on disk in part"
_PAGES: dict[str, PagePlacement] = {MEMORY: "memory", DISK: "disk", PARTLY: "auto"}


def way_of(name: str, way: str, budget: int) -> Callable[[Tensor], Tensor]:
    """The model as one strategy runs it, streamed within a budget in bytes."""
    model = made(name)
    if way.startswith("diffusers"):
        model.vae.enable_tiling()
        model.vae.tile_sample_min_size, model.vae.tile_latent_min_size = TILE, TILE // 8
        return model
    if way == "whole":
        return model
    return Streamed(model, budget=budget, pages=_PAGES[way])


def ways(name: str) -> tuple[str, ...]:
    """What is compared for a model."""
    if name.startswith("VAE"):
        return "whole", MEMORY, DISK, PARTLY, f"diffusers tiles of {TILE} px"
    return "whole", MEMORY, DISK


_ready: dict[tuple[Any, ...], Callable[[Tensor], Tensor]] = {}


def run_once(name: str, way: str, height: int, width: int, budget: int) -> None:
    """One run; the model and its plan are made in the first, which is not measured."""
    torch.set_num_threads(2)
    key = (name, way, height, width)
    if key not in _ready:
        _ready[key] = way_of(name, way, budget)
    with torch.no_grad():
        _ready[key](given(name, height, width))


def run_times(
    name: str, height: int, width: int, budgets: dict[str, int], pairs: int
) -> dict[str, dict[str, Any]]:
    """Processor seconds of each way, and how far its result is from the whole run's."""
    torch.set_num_threads(2)
    image, order = given(name, height, width), list(ways(name))
    runs, figures = {}, {way: {"cpu_s": []} for way in order}
    whole: Tensor | None = None
    with torch.no_grad():
        for way in order:
            start = time.process_time()
            runs[way] = way_of(name, way, budgets.get(way, 0))
            if isinstance(runs[way], Streamed):
                figures[way]["plan"] = runs[way].explain(image)
            figures[way]["preparing_cpu_s"] = round(time.process_time() - start, 2)
            result = runs[way](image)
            whole = result if whole is None else whole
            figures[way] |= difference(result, whole)
            del result
        for _, way in in_turns(order, pairs):
            start = time.process_time()
            runs[way](image)
            figures[way]["cpu_s"].append(round(time.process_time() - start, 3))
    return figures


def run_errors(
    name: str, height: int, width: int, budget: int, seed: int
) -> dict[str, dict[str, float]]:
    """For one input the largest and the mean difference of the whole and of the streamed run from
    the whole one in fp64, and what one value of ``TAIL`` exceeds: the largest of millions is a
    matter of luck too, of one pixel."""
    torch.set_num_threads(2)
    image, errors = given(name, height, width, seed), {}
    with torch.no_grad():
        expected = made(name).double()(image.double())
        for way in ("whole", MEMORY):
            difference = (way_of(name, way, budget)(image).double() - expected).abs()
            tail = difference.flatten().topk(math.ceil(difference.numel() / TAIL)).values[-1]
            errors[way] = {
                "errors_to_fp64": difference.max().item(),
                "tail_errors_to_fp64": tail.item(),
                "rms_errors_to_fp64": difference.square().mean().sqrt().item(),
            }
            del difference
    return errors


def difference(result: Tensor, whole: Tensor) -> dict[str, float | None]:
    """The largest difference, and the mean one in decibels of the whole's range."""
    difference = (result.double() - whole.double()).abs()
    mean = difference.square().mean().sqrt().item()
    span = (whole.max() - whole.min()).item()
    return {
        "max_abs_error": difference.max().item(),
        "range": span,
        "psnr_db": round(20 * math.log10(span / mean), 1) if mean else None,
    }
