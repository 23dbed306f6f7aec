"""Settings of every job that runs a model on images, validated."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Le

from lowtide.core.errors import UsageError
from lowtide.core.input_file import file_sha256
from lowtide.core.option import MOST_COUNT, Count, Option
from lowtide.jobs.engine.settings import RunSettings
from lowtide.models.model_files import is_onnx

if TYPE_CHECKING:
    from lowtide.media import EncodeOptions
    from lowtide.media.image_info import ImageInfo
    from lowtide.memory.choice import AccuracyRequest
    from lowtide.models import ModelDescriptor
    from lowtide.models.descriptor import Runtime
    from lowtide.streaming.planner.model_facts import PlanOverrides

PLAN_PANEL, _FILES = "Overriding the plan", "Files"
# Settings that are gone, as the journals of release 0.2 know them.
_GONE = {"provider": "cpu"}
# And those that are new: at what was done before, the journals do not know them.
_NEW = {
    **{"deinterlace": False, "sound": "auto", "hot_pixels": False},
    **{
        "computed_by": "torch",
        "strength": 1.0,
        "chroma_only": False,
        "preview": None,
        "denoise": None,
        "slices": False,
    },
}


@dataclass(frozen=True, kw_only=True)
class ImageSettings(RunSettings):
    """Settings of a job that runs one model on images, except its files.

    Attributes:
        model: A bundled model or a file (.safetensors, .pth, .ckpt, .onnx).
        self_ensemble: Run the model on eight rotations and flips of the image and average the
            results: a little closer to the original, in eight times the time.
        strategy: whole runs the image at once, streamed layer by layer over bands of rows, tiled in
            tiles.
        cuda_graphs: Capture the network in a CUDA graph for the shape of its tiles and replay it:
            for light networks in small tiles. Takes the memory of a second run. Not verified yet.
        compile: torch.compile, which takes seconds to minutes before the first result. auto: as the
            plan of --plan, else off.
        tile: Side of the tiles, in input pixels.
        tile_overlap: Pixels that neighboring tiles share. Default: what the receptive field needs.
        tile_batch_size: Tiles of a row run at once.
        streams: Images of a folder in flight: while one is computed, others are being written. On a
            GPU tiles of an image too: while one is computed, others are copied to and from it. As
            far as the budget allows. 1: one after another.
        hann_blend: Blend neighboring tiles over part of their overlap. Default: only where tiles
            differ from the whole image.
        format: png, jpg, webp, tif or avif, for results in a folder or without a suffix. Default:
            as the input.
        suffix: Insert this between name and extension of results that are named after inputs: _x2
            makes photo_x2.png.
        strip_metadata: Remove EXIF, XMP, IPTC and resolution, but not the color profile, on which
            colors depend.
        max_pixels: Refuse inputs with more pixels than this.
        png_compression: 0 fast to 9 small.
        jpeg_quality: 1 to 100.
        webp_quality: 1 to 100.
        webp_lossless: Lossless WebP.
        avif_quality: 1 to 100.
        tiff_compression: Compression of TIFF files.
    """

    model: Annotated[str | Path | None, Option(flags=("-m", "--model"))] = None
    self_ensemble: bool = False
    strategy: Annotated[Literal["auto", "whole", "streamed", "tiled"], Option(PLAN_PANEL)] = "auto"
    cuda_graphs: Annotated[bool, Option(PLAN_PANEL)] = False
    compile: Annotated[Literal["auto", "on", "off"], Option(PLAN_PANEL)] = "auto"
    tile: Annotated[Count | None, Option(PLAN_PANEL, metavar="PIXELS")] = None
    tile_overlap: Annotated[
        Annotated[int, Ge(0), Le(MOST_COUNT)] | None, Option(PLAN_PANEL, metavar="PIXELS")
    ] = None
    tile_batch_size: Annotated[
        Annotated[int, Ge(1), Le(256)] | None, Option(PLAN_PANEL, metavar="N")
    ] = None
    streams: Annotated[int, Ge(1), Le(16), Option(PLAN_PANEL, metavar="N")] = 2
    hann_blend: Annotated[bool | None, Option(PLAN_PANEL)] = None
    format: Annotated[str | None, Option(_FILES, metavar="NAME")] = None
    suffix: Annotated[str, Option(_FILES, metavar="TEXT")] = ""
    strip_metadata: Annotated[bool, Option(_FILES)] = False
    max_pixels: Annotated[int, Ge(1), Option(_FILES)] = 1_000_000_000
    png_compression: Annotated[int, Ge(0), Le(9), Option(_FILES)] = 3
    jpeg_quality: Annotated[int, Ge(1), Le(100), Option(_FILES)] = 95
    webp_quality: Annotated[int, Ge(1), Le(100), Option(_FILES)] = 90
    webp_lossless: Annotated[bool, Option(_FILES)] = False
    avif_quality: Annotated[int, Ge(1), Le(100), Option(_FILES)] = 80
    tiff_compression: Annotated[Literal["none", "lzw", "deflate"], Option(_FILES)] = "deflate"

    # Settings that determine a result's bytes, in the order in which journals know them. The others
    # change the speed, the source or the name of a file.
    hashed: ClassVar[str]

    def check(self) -> None:
        """Raise `UsageError` for settings that contradict each other."""
        super().check()
        if any(sign in "/\\" or not sign.isprintable() for sign in self.suffix):
            raise UsageError(
                f"--suffix {self.suffix!r} cannot be part of a file name: no slashes, and only"
                " printable characters",
                hint="--suffix _x2",
            )
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

    @property
    def accuracy_request(self) -> AccuracyRequest:
        """The accuracy requested; by default bounded for tiles, else exact."""
        if self.accuracy is not None:
            return self.accuracy
        return "bounded" if self.overrides.requires_tiles or self.strategy == "tiled" else "exact"

    @property
    def model_name(self) -> str:
        """The model requested, or the bundled one that suits."""
        raise NotImplementedError

    @property
    def computed_by(self) -> Runtime:
        """The runtime that computes the model."""
        return "torch"

    @property
    def denoiser(self) -> str | None:
        """The denoiser whose results the model gets, if any."""
        return None

    def check_model(self, model: ModelDescriptor) -> None:
        """Raise `UsageError` for a model of another kind."""
        raise NotImplementedError

    @property
    def overrides(self) -> PlanOverrides:
        """The settings that the planner has to respect."""
        from lowtide.streaming.planner.model_facts import PlanOverrides

        return PlanOverrides(
            strategy=self.strategy,
            tile=self.tile,
            overlap=self.tile_overlap,
            batch=self.tile_batch_size,
            hann_blend=self.hann_blend,
        )

    @property
    def encode_options(self) -> EncodeOptions:
        """The settings for the encoders."""
        from lowtide.media import EncodeOptions

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
        return info.width * model_scale, info.height * model_scale

    def made_with(self, model_sha256: str, precision: str) -> dict[str, Any]:
        """Return what `content_hash` is of, by name, to say what differs."""
        model = f"{self.model_name} ({model_sha256[:8]})"
        return {"model": model, "computed in": precision, **self._hashed_values()}

    def _hashed_values(self) -> dict[str, Any]:
        return {
            name: _GONE[name] if name in _GONE else getattr(self, name)
            for name in self.hashed.split()
            if name not in _NEW or getattr(self, name) != _NEW[name]
        }

    def content_hash(self, model_sha256: str, precision: str) -> str:
        """Return a SHA-256 of all that determines the result's bytes, except the input."""
        values = json.dumps(self._hashed_values(), separators=(",", ":"), ensure_ascii=False)
        if self.plan_file is not None:
            values += file_sha256(self.plan_file)
        return hashlib.sha256(f"{model_sha256} {precision} {values}".encode()).hexdigest()
