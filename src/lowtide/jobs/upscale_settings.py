"""Settings of an upscaling job, validated."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar

from pydantic import Field, field_validator

from lowtide.core.errors import UsageError
from lowtide.core.hashing import file_sha256
from lowtide.core.precision import Precision, is_eight_bits
from lowtide.jobs.settings import RunSettings
from lowtide.media import EncodeOptions
from lowtide.media.image_info import ImageInfo
from lowtide.memory.budget import Budget
from lowtide.memory.choice import AccuracyRequest
from lowtide.models.model_files import is_onnx
from lowtide.models.onnx_providers import ProviderName
from lowtide.streaming.planner.model_facts import Overrides, StrategyName

F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_MODELS = {2: "lowtide-x2", 4: "lowtide-x4"}

# Settings that determine a result's bytes, in the order in which journals know them. The others
# change the speed, the source or the name of a file.
_HASHED = (
    "scale width height max_side format precision accuracy strategy self_ensemble compile"
    " cuda_graphs provider tile tile_overlap tile_batch_size hann_blend strip_metadata"
    " png_compression jpeg_quality webp_quality webp_lossless avif_quality tiff_compression"
)


class UpscaleKeywords(TypedDict, total=False):
    """Keywords of the calls that upscale: the fields of `UpscaleSettings`."""

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
    scale: float | None
    width: int | None
    height: int | None
    max_side: int | None
    format: str | None
    suffix: str
    strategy: StrategyName
    self_ensemble: bool
    compile: Literal["auto", "on", "off"]
    cuda_graphs: bool
    provider: ProviderName
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


def show_keywords(call: F) -> F:
    """Decorate a call with ``**settings`` so that its signature shows `UpscaleKeywords`."""
    shape, fields = inspect.signature(call), UpscaleSettings.model_fields
    keyword = functools.partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)
    shown = [
        keyword(name, default=fields[name].default, annotation=annotation)
        for name, annotation in UpscaleKeywords.__annotations__.items()
    ]
    own = [one for one in shape.parameters.values() if one.name != "settings"]
    call.__signature__ = shape.replace(parameters=[*own, *shown])  # pyright: ignore[reportFunctionMemberAccess]
    return call


class UpscaleSettings(RunSettings):
    """Settings of an upscaling job, except its files.

    The target size is one of ``scale``, ``width`` and/or ``height`` (one keeps the aspect ratio,
    both are taken as they are), or ``max_side``; none means the model's own scale.
    """

    model: str | Path | None = None
    scale: float | None = Field(None, gt=0, le=64, examples=[2])
    width: int | None = Field(None, ge=1)
    height: int | None = Field(None, ge=1)
    max_side: int | None = Field(None, ge=1)
    format: str | None = None
    suffix: str = ""
    strategy: Literal["auto", "whole", "streamed", "tiled"] = "auto"
    self_ensemble: bool = False
    compile: Literal["auto", "on", "off"] = "auto"
    cuda_graphs: bool = False
    provider: ProviderName = "cpu"
    tile: int | None = Field(None, ge=1)
    tile_overlap: int | None = Field(None, ge=0)
    tile_batch_size: int | None = Field(None, ge=1, le=256)
    hann_blend: bool | None = None
    streams: int = Field(2, ge=1, le=16)
    strip_metadata: bool = False
    max_pixels: int = Field(1_000_000_000, ge=1)
    png_compression: int = Field(3, ge=0, le=9)
    jpeg_quality: int = Field(95, ge=1, le=100)
    webp_quality: int = Field(90, ge=1, le=100)
    webp_lossless: bool = False
    avif_quality: int = Field(80, ge=1, le=100)
    tiff_compression: Literal["none", "lzw", "deflate"] = "deflate"

    @field_validator("suffix")
    @classmethod
    def _check_suffix(cls, text: str) -> str:
        if any(sign in "/\\" or not sign.isprintable() for sign in text):
            raise UsageError(
                f"--suffix {text!r} cannot be part of a file name: no slashes, and only printable"
                " characters",
                hint="--suffix _x2",
            )
        return text

    def check(self) -> None:
        """Raise `UsageError` for settings that contradict each other."""
        super().check()
        ways = {
            "--scale": self.scale is not None,
            "--width/--height": self.width is not None or self.height is not None,
            "--max-side": self.max_side is not None,
        }
        chosen = [name for name, given in ways.items() if given]
        if len(chosen) > 1:
            raise UsageError(
                f"{' and '.join(chosen)} contradict each other", hint=f"keep {chosen[0]} only"
            )
        if self.strategy in ("whole", "streamed") and self.overrides.requires_tiles:
            raise UsageError(
                f"--strategy {self.strategy} has no tiles, but an option for tiles was given",
                hint="drop the tile options, or use --strategy tiled",
            )
        other = "--strategy whole or tiled, or"
        if self.compile == "on" and self.strategy == "streamed":
            raise UsageError("streamed networks are not compiled", hint=f"{other} --compile off")
        if self.cuda_graphs:
            self._check_graphs()
        if is_eight_bits(self.precision) and self.strategy == "streamed":
            what = "8-bit layers do not run in bands of rows"
            raise UsageError(what, hint=f"{other} another --precision")
        if is_onnx(self.model_name):
            self._check_onnx()
        elif self.provider != "cpu":
            raise UsageError(
                f"--provider {self.provider} is for .onnx files, and {self.model_name} is not one",
                hint=f"lowtide export onnx {self.model_name} -o FILE.onnx makes one",
            )
        ways = self.strategy, self.precision, self.compile, self.accuracy or "auto"
        said = set(ways) != {"auto"} or self.cuda_graphs or self.overrides.requires_tiles
        if self.plan_file is not None and said:
            raise UsageError(
                "--plan says how to run, and so does another option",
                hint="drop --strategy, --accuracy, --precision, --compile, --cuda-graphs and the"
                " tile options, or --plan",
            )

    def _check_graphs(self) -> None:
        """Require one GPU, one tile shape and no compiling for CUDA graphs."""
        if self.strategy == "streamed":
            no, hint = "streamed networks", "--strategy whole or tiled"
        elif self.compile == "on":
            no, hint = "compiled networks", "--compile off"
        elif len(self.devices) > 1:
            no, hint = "several devices at once", "--device, with one of them"
        elif is_onnx(self.model_name):
            no, hint = "ONNX files", "the PyTorch weights that it was exported from"
        else:
            return
        raise UsageError(f"CUDA graphs are not supported for {no}", hint=hint)

    def _check_onnx(self) -> None:
        """Require settings that ONNX Runtime supports for an ONNX file."""
        places = sorted({self.device, *self.devices} - {"auto", "cpu"})
        weights = "the PyTorch weights that it was exported from"
        if places:
            no, hint = f"on {places[0]}: that has not been verified", f"--device cpu, or {weights}"
        elif self.precision not in ("auto", "fp32"):
            no = f"in {self.precision}: its data types are those of the file"
            hint = "--precision auto; `lowtide export onnx MODEL --precision fp16` makes another"
        elif self.compile == "on":
            no, hint = "by PyTorch's compiler, but by ONNX Runtime", "--compile off"
        elif self.provider != "cpu" and len(self.devices) > 1:
            no, hint = f"by {self.provider} several times at once", "one device"
        elif self.strategy == "streamed":
            no = "in bands of rows: ONNX Runtime runs its whole graph"
            hint = f"--strategy whole or tiled, or {weights}"
        else:
            return
        raise UsageError(f"{self.model_name} is an ONNX file and is not run {no}", hint=hint)

    @property
    def device_names(self) -> tuple[str, ...]:
        """The devices to run on; for an ONNX file ``auto`` is the CPU."""
        if self.devices or self.device != "auto" or not is_onnx(self.model_name):
            return super().device_names
        return ("cpu",)

    @property
    def accuracy_request(self) -> AccuracyRequest:
        """The accuracy requested; by default bounded for tiles, else exact."""
        if self.accuracy is not None:
            return self.accuracy
        return "bounded" if self.overrides.requires_tiles or self.strategy == "tiled" else "exact"

    @property
    def model_name(self) -> str:
        """The model requested, or the bundled one that suits the target size."""
        if self.model is not None:
            return str(self.model)
        return DEFAULT_MODELS[4 if self.scale is not None and self.scale > 2 else 2]

    @property
    def overrides(self) -> Overrides:
        """The settings that the planner has to respect."""
        return Overrides(
            strategy=self.strategy,
            tile=self.tile,
            overlap=self.tile_overlap,
            batch=self.tile_batch_size,
            hann_blend=self.hann_blend,
        )

    @property
    def encode_options(self) -> EncodeOptions:
        """The settings for the encoders."""
        return EncodeOptions(
            png_compression=self.png_compression,
            jpeg_quality=self.jpeg_quality,
            webp_quality=self.webp_quality,
            webp_lossless=self.webp_lossless,
            avif_quality=self.avif_quality,
            tiff_compression=self.tiff_compression,
        )

    def target_size(self, info: ImageInfo, model_scale: int) -> tuple[int, int]:
        """Return (W, H) of the output file for an image with ``info``."""
        if self.width is not None and self.height is not None:
            return self.width, self.height
        if self.width is not None:
            factor = self.width / info.width
        elif self.height is not None:
            factor = self.height / info.height
        elif self.max_side is not None:
            factor = self.max_side / max(info.width, info.height)
        else:
            factor = self.scale or model_scale
        return _scaled(info.width, factor), _scaled(info.height, factor)

    def content_hash(self, model_sha256: str, precision: str) -> str:
        """Return a SHA-256 of all that determines the result's bytes, except the input."""
        names = _HASHED.split()
        fields = self.model_dump(mode="json", include=set(names))
        ordered = {name: fields[name] for name in names}
        values = json.dumps(ordered, separators=(",", ":"), ensure_ascii=False)
        if self.plan_file is not None:
            values += file_sha256(self.plan_file)
        return hashlib.sha256(f"{model_sha256} {precision} {values}".encode()).hexdigest()


def _scaled(side: int, factor: float) -> int:
    # The tolerance keeps factors such as 0.1 + 0.2 from losing a pixel.
    return max(1, math.floor(side * factor + 0.5 + 1e-9))
