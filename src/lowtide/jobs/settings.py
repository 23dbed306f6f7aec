"""Settings of an upscaling job, validated."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from lowtide.core.errors import UsageError
from lowtide.core.hashing import file_sha256
from lowtide.core.precision import Precision, is_eight_bits
from lowtide.core.signal import ImageInfo
from lowtide.media import EncodeOptions
from lowtide.memory.choice import AccuracyRequest
from lowtide.models.model_files import is_onnx
from lowtide.models.onnx_providers import ProviderName
from lowtide.streaming.planner.model_facts import Overrides

M = TypeVar("M", bound=BaseModel)

DEFAULT_MODELS = {2: "lowtide-x2", 4: "lowtide-x4"}

# Settings that change the speed, the source or the name of a file, not its bytes.
_NOT_IN_HASH = {"device", "max_pixels", "model", "plan_file", "streams", "devices", "suffix"}


_PROBLEMS = {
    "greater_than": "has to be above {gt:g}",
    "greater_than_equal": "has to be at least {ge:g}",
    "less_than_equal": "has to be at most {le:g}",
    "literal_error": "is not one of {expected}",
    "int_parsing": "is not a whole number",
    "int_from_float": "is not a whole number",
    "int_type": "is not a whole number",
    "float_parsing": "is not a number",
    "float_type": "is not a number",
}


def validate_settings(model_class: type[M], values: dict[str, Any]) -> M:
    """Return ``kind(**values)``, or raise `UsageError` that names the invalid option."""
    try:
        return model_class(**values)
    except ValidationError as error:
        problem, *more = error.errors()
    name = str(problem["loc"][0])
    option, field = "--" + name.replace("_", "-"), model_class.model_fields.get(name)
    if field is None:
        raise UsageError(
            f"there is no setting {name!r}", hint=f"one of {', '.join(model_class.model_fields)}"
        )
    given, words = problem["input"], _PROBLEMS.get(problem["type"])
    shown = f"{given:g}" if isinstance(given, float) else given
    # A union of "auto" and other types reports one error for each member.
    both = [one.get("ctx", {}).get("expected") for one in (problem, *more)]
    details = {
        **problem.get("ctx", {}),
        "expected": ", ".join(filter(None, both)).replace(" or ", ", "),
    }
    trouble = words.format(**details) if words else problem["msg"].lower()
    usual = field.examples[0] if field.examples else field.default
    raise UsageError(
        f"{option} {shown} {trouble}", hint=f"{option} {usual}" if usual not in (None, ()) else None
    )


class UpscaleSettings(BaseModel):
    """Settings of an upscaling job, except its files and its budget.

    The target size is one of ``scale``, ``width`` and/or ``height`` (one keeps the aspect ratio,
    both are taken as they are), or ``max_side``; none means the model's own scale.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str | Path | None = None
    scale: float | None = Field(None, gt=0, le=64, examples=[2])
    width: int | None = Field(None, ge=1)
    height: int | None = Field(None, ge=1)
    max_side: int | None = Field(None, ge=1)
    format: str | None = None
    suffix: str = ""
    device: str = "auto"
    devices: tuple[str, ...] = ()
    precision: Literal["auto"] | Precision = "auto"
    accuracy: Literal["exact", "bounded", "fast"] | None = None
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
    plan_file: Path | None = None

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

    @field_validator("devices", mode="before")
    @classmethod
    def _split_devices(cls, given: Any) -> Any:
        """Split ``"cuda:0,cuda:1"`` into a list."""
        if isinstance(given, str):
            return tuple(name.strip() for name in given.split(",") if name.strip())
        return given or ()

    @classmethod
    def of(cls, **values: Any) -> UpscaleSettings:
        """Build settings from keywords; raises `UsageError` for invalid ones."""
        settings = validate_settings(cls, values)
        settings._check()
        return settings

    def _check(self) -> None:
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
        if self.devices and self.device != "auto":
            raise UsageError("--device and --devices contradict each other", hint="drop one")
        if self.strategy in ("whole", "streamed") and self.overrides.requires_tiles:
            raise UsageError(
                f"--strategy {self.strategy} has no tiles, but an option for tiles was given",
                hint="drop the tile options, or use --strategy tiled",
            )
        if self.compile == "on" and self.strategy == "streamed":
            raise UsageError(
                "streamed networks are not compiled",
                hint="--strategy whole or tiled, or --compile off",
            )
        if self.cuda_graphs:
            self._check_graphs()
        if is_eight_bits(self.precision) and self.strategy == "streamed":
            raise UsageError(
                "8-bit layers do not run in bands of rows",
                hint="--strategy whole or tiled, or another --precision",
            )
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
    def one_device(self) -> str:
        """``device``, with ``auto`` resolved to the CPU for an ONNX file."""
        return "cpu" if self.device == "auto" and is_onnx(self.model_name) else self.device

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
        values = self.model_dump_json(exclude=_NOT_IN_HASH)
        if self.plan_file is not None:
            values += file_sha256(self.plan_file)
        return hashlib.sha256(f"{model_sha256} {precision} {values}".encode()).hexdigest()


def _scaled(side: int, factor: float) -> int:
    # The tolerance keeps factors such as 0.1 + 0.2 from losing a pixel.
    return max(1, math.floor(side * factor + 0.5 + 1e-9))
