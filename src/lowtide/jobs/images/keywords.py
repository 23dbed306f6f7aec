"""Keywords of the public calls that run a job on images, for type checkers and editors."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypedDict

from lowtide.core.option import Precision
from lowtide.memory.budget import Budget
from lowtide.memory.choice import AccuracyRequest
from lowtide.streaming.planner.model_facts import StrategyName


class ImageKeywords(TypedDict, total=False):
    """Keywords of every such call: the fields of `ImageSettings`."""

    budget: str | int | Budget
    host_budget: str | int | None
    disk_budget: str | int | None
    scratch: str | Path | None
    device: str
    devices: str | tuple[str, ...] | list[str]
    precision: Literal["auto"] | Precision
    accuracy: AccuracyRequest | None
    plan_file: str | Path | None
    model: str | Path | None
    format: str | None
    suffix: str
    strategy: StrategyName
    self_ensemble: bool
    compile: Literal["auto", "on", "off"]
    cuda_graphs: bool
    tile: int | None
    tile_overlap: int | None
    tile_batch_size: int | None
    hann_blend: bool | None
    streams: int
    strip_metadata: bool
    max_pixels: int
    png_compression: int
    jpeg_quality: int
    webp_quality: int
    webp_lossless: bool
    avif_quality: int
    tiff_compression: Literal["none", "lzw", "deflate"]


class EnlargeKeywords(ImageKeywords, total=False):
    """Keywords of the calls that enlarge: the fields of `EnlargeSettings`."""

    scale: float | None
    width: int | None
    height: int | None
    max_side: int | None
    denoise: Literal["auto"] | float | None


class UpscaleKeywords(EnlargeKeywords, total=False):
    """Keywords of the calls that upscale pictures: the fields of `UpscaleSettings`."""

    runtime: Literal["auto", "torch", "ncnn"]
