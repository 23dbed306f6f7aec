"""Keywords of the public calls that run a job on images, typed and shown in signatures."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar

from lowtide.core.option import Precision
from lowtide.jobs.images.settings import ImageSettings
from lowtide.memory.budget import Budget
from lowtide.memory.choice import AccuracyRequest
from lowtide.streaming.planner.model_facts import StrategyName

F = TypeVar("F", bound=Callable[..., Any])


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


def show_keywords(settings: type[ImageSettings], keywords: Any) -> Callable[[F], F]:
    """Decorate a call with ``**settings`` so that its signature shows ``keywords``.

    ``keywords`` is a `TypedDict` with the fields of the ``settings`` class.
    """
    fields = settings.__dataclass_fields__
    keyword = functools.partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)
    shown = [
        keyword(name, default=fields[name].default, annotation=annotation)
        for name, annotation in keywords.__annotations__.items()
    ]

    def decorate(call: F) -> F:
        shape = inspect.signature(call)
        own = [one for one in shape.parameters.values() if one.name != "settings"]
        call.__signature__ = shape.replace(parameters=[*own, *shown])  # pyright: ignore[reportFunctionMemberAccess]
        return call

    return decorate
