"""The rows of the GPU report: what has waited for a GPU, oldest first.

`Row.needs` says why a row cannot run somewhere.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import large_images
import torch
from gpu_measures import (
    Figures,
    Place,
    compare_tile_loops,
    device_facts,
    gpu_tests,
    large_image,
    reserved,
    training_by_two,
    ways_of,
)


@dataclass(frozen=True)
class Row:
    """A row's name and its function; ``needs`` is the reason why it cannot run in a place."""

    name: str
    measure: Callable[[Place], Figures]
    needs: Callable[[Place], str | None] = lambda place: None


def a_gpu(why: str) -> Callable[[Place], str | None]:
    """Rows that only a CUDA device can run."""
    return lambda place: None if place.on_gpu else f"needs a GPU: {why}"


def two_devices(place: Place) -> str | None:
    """Rows for several devices."""
    few = place.on_gpu and torch.cuda.device_count() < 2
    return "needs two GPUs, and this machine has one" if few else None


def diffusers_is_here(place: Place) -> str | None:
    """Rows of autoencoders."""
    if not place.on_gpu:
        return "needs a GPU: it counts what PyTorch's allocator for CUDA reserves"
    return None if importlib.util.find_spec("diffusers") else "diffusers is not installed"


def _graphs(precision: str) -> Row:
    """A network captured as a CUDA graph for the shape of its tiles."""
    way = {"precision": precision, "tile": 64}
    return Row(
        f"CUDA graphs, {precision}",
        ways_of({"plain": way, "captured": way | {"cuda_graphs": True}}),
        a_gpu("a processor has no CUDA graphs"),
    )


_FP32 = {"precision": "fp32"}
_TILES = _FP32 | {"tile": 256}
# Where reserved bytes were furthest from the prediction on an H200.
_AUTOENCODERS: tuple[tuple[str, int, str, Literal["auto", "host"]], ...] = (
    ("VAE decode", 1024, "tf32", "auto"),
    ("VAE decode", 1024, "fp32", "host"),
    ("VAE decode", 2048, "bf16", "host"),
    ("VAE encode", 1024, "bf16", "auto"),
)
ROWS = (
    Row("device", device_facts),
    Row("tile loop", compare_tile_loops),
    *(Row(f"large image, {size}", large_image(size)) for size in large_images.SIZES),
    Row("compiled", ways_of({"plain": _TILES, "compiled": _TILES | {"compile": "on"}})),
    Row("streams", ways_of({"one": _TILES | {"streams": 1}, "two": _TILES | {"streams": 2}})),
    Row(
        "tiles on two devices",
        ways_of({"one": _TILES, "two": _TILES | {"devices": True}}),
        two_devices,
    ),
    Row("training on two GPUs", training_by_two, two_devices),
    _graphs("fp32"),
    _graphs("bf16"),
    *(
        Row(
            f"reserved by {name} {side}², {precision}, pages: {pages}",
            reserved(name, side, precision, pages),
            diffusers_is_here,
        )
        for name, side, precision, pages in _AUTOENCODERS
    ),
    Row("tests", gpu_tests, a_gpu("these are the tests marked gpu")),
)
