"""Commands `lowtide vae encode|decode|roundtrip`: videos to latents and back within a budget."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowtide.cli.common_options import FILE_FLAGS, output_option
from lowtide.cli.image_command import run_and_print_job
from lowtide.cli.settings_options import with_settings
from lowtide.cli.shell import report_errors
from lowtide.core.input_file import is_folder
from lowtide.jobs.vae.settings import VaeSettings
from lowtide.memory.library_memory import require_room_for_libraries

if TYPE_CHECKING:
    from lowtide.jobs.vae.report import VaeReport

_ORDER = "output model budget frames time deinterlace max_side device precision sample seed dry_run"
_VIDEO_OUT, _READING = "codec quality preset", "frames time deinterlace max_side"
Video = Annotated[Path, typer.Argument(metavar="VIDEO", help="Video file.")]
Latents = Annotated[
    Path, typer.Argument(metavar="LATENTS", help="A .safetensors file with the key latents.")
]


@report_errors
@with_settings(VaeSettings, _ORDER, flags=FILE_FLAGS, without=f"fps {_VIDEO_OUT}")
def encode(
    video: Video,
    output: Annotated[Path, output_option("File of the latents, .safetensors.")],
    **settings: Any,
) -> None:
    """Encode a video to latents by a video autoencoder, within a memory budget.

    The file also says what decoding needs to make the same video again: frames, size and time
    stamps. Latents are not scaled; its entry says by what a diffusion model scales them.
    """
    _run("encode", video, output, **settings)


@report_errors
@with_settings(VaeSettings, f"{_ORDER} fps", flags=FILE_FLAGS, without=f"sample seed {_READING}")
def decode(
    latents: Latents,
    output: Annotated[Path, output_option("Video file.")],
    **settings: Any,
) -> None:
    """Decode latents to a video by a video autoencoder, within a memory budget.

    One continuous stream, without tiles or seams: frames are equal to those of the model's own call
    to rounding.
    """
    _run("decode", latents, output, **settings)


@report_errors
@with_settings(VaeSettings, _ORDER, flags=FILE_FLAGS, without="fps")
def roundtrip(
    video: Video,
    output: Annotated[
        Path | None, output_option("Video file of the decoded frames, with the sound of the input.")
    ] = None,
    **settings: Any,
) -> None:
    """Encode a video and decode it again, and say how much the autoencoder loses.

    PSNR and SSIM compare the frames with those that went in.
    """
    _run("roundtrip", video, output, **settings)


def _run(job: str, given: Path, output: Path | None, **settings: Any) -> None:
    """Run the job of this name in `lowtide.jobs.vae.command`, and print its report."""

    def load() -> Callable[..., VaeReport]:
        require_room_for_libraries("lowtide.jobs.vae.command", *_libraries(settings["model"]))
        from lowtide.jobs.vae import command as vae

        return getattr(vae, job)

    run_and_print_job(load, given, output, **settings)


def _libraries(model: Path | None) -> tuple[str, ...]:
    """Return what loading a model imports, beside Lowtide's: nothing for a single file."""
    whole = model is not None and is_folder(model)
    return ("diffusers.models.autoencoders", "torch.export._trace") if whole else ()
