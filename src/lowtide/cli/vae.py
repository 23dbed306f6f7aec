"""Commands `lowtide vae encode|decode|roundtrip`: videos to latents and back within a budget."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowtide.cli.common_options import FILE_FLAGS, output_option
from lowtide.cli.print_report import memory_line
from lowtide.cli.progress_bar import run_with_progress
from lowtide.cli.settings_options import with_settings
from lowtide.cli.shell import handle_errors, print_result
from lowtide.core.input_file import is_folder
from lowtide.core.units import format_bytes
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


@handle_errors
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


@handle_errors
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


@handle_errors
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


def _run(
    job: str, given: Path, output: Path | None, *, quiet: bool, as_json: bool, **settings: Any
) -> None:
    """Run the job of this name in `lowtide.jobs.vae.command`, and print its report."""

    def load() -> Callable[..., VaeReport]:
        require_room_for_libraries("lowtide.jobs.vae.command", *_libraries(settings["model"]))
        from lowtide.jobs.vae import command as vae

        return getattr(vae, job)

    report = run_with_progress(load, given, output, quiet=quiet, **settings)
    print_result(report, lambda: _print(report), lambda: None, as_json=as_json)


def _libraries(model: Path | None) -> tuple[str, ...]:
    """Return what loading a model imports, beside Lowtide's: nothing for a single file."""
    whole = model is not None and is_folder(model)
    return ("diffusers.models.autoencoders", "torch.export._trace") if whole else ()


def _print(report: VaeReport) -> None:
    channels, number, height, width = report.latents
    size = f"{report.frames} frames of {report.width}×{report.height}"
    latents = f"{number} latents of {channels}×{height}×{width}"
    what = {
        "encode": f"{size} → {latents}",
        "decode": f"{latents} → {size}",
        "roundtrip": f"{size} → {latents} → {size}",
    }[report.operation]
    typer.echo(f"{report.input}: {what}")
    if report.output is not None and report.status == "done":
        typer.echo(f"  written    {report.output}")
    typer.echo(f"  model      {report.model}, {report.device}, {format_bytes(report.budget_bytes)}")
    typer.echo(f"  precision  {report.precision}")
    for name, plan in report.plans.items():
        typer.echo(f"  {name:<10} {plan}")
    if report.memory is not None:
        typer.echo(f"  memory     {memory_line(report.memory)}")
    if report.seconds:
        spent = ", ".join(f"{name} {taken:.3g} s" for name, taken in report.seconds.items())
        typer.echo(f"  time       {spent}; {report.fps:.3g} frames a second")
    if report.operation == "roundtrip" and report.status == "done":
        typer.echo(f"  equality   {_equality(report)}")
    for note in report.notes:
        typer.echo(f"  note       {note}")
    for event in report.events:
        typer.echo(f"  event      {event}")


def _equality(report: VaeReport) -> str:
    if report.psnr_db is None:
        return "no difference"
    likeness = "" if report.ssim is None else f", SSIM {report.ssim:.4f}"
    return f"PSNR {report.psnr_db:.2f} dB, worst frame {report.worst_psnr_db:.2f} dB{likeness}"
