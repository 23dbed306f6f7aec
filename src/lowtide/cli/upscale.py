"""Command `lowtide upscale`: upscale images within a memory budget."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from lowtide.cli.progress_bar import ProgressLine
from lowtide.cli.shell import handle_errors, option, print_result
from lowtide.core.errors import UsageError

if TYPE_CHECKING:
    from lowtide.jobs.report import UpscaleReport

# Arguments that are not settings of the job.
_OWN = {"inputs", "output", "dry_run", "force", "report", "as_json", "quiet", "tile_auto"}
DEFAULT_OUTPUT = "upscaled/"  # for a dry run, which writes nothing
_MAIN, _SIZE, _TILES, _FILES, _OUT = (
    "Main",
    "Target size",
    "Overriding the plan",
    "Files",
    "Output",
)


@handle_errors
def upscale(
    inputs: Annotated[
        list[str],
        typer.Argument(help="Files, folders (their tree is mirrored) or quoted glob patterns."),
    ],
    output: Annotated[
        str | None,
        option(
            "-o",
            "--output",
            panel=_MAIN,
            metavar="PATH",
            help=(
                "A file for one input; a folder for several, or with a slash at its end. Nothing is"
                " overwritten without --force."
            ),
        ),
    ] = None,
    model: Annotated[
        str | None,
        option(
            "-m",
            "--model",
            panel=_MAIN,
            help=(
                "A bundled model or a file (.safetensors, .pth, .ckpt, .onnx)."
                " Default: lowtide-x2, or lowtide-x4 for a --scale above 2."
            ),
        ),
    ] = None,
    budget: Annotated[
        str,
        option(
            "-b",
            "--budget",
            panel=_MAIN,
            help=("Memory for the run on the device: 6GiB, 80% of what is free, or auto."),
        ),
    ] = "auto",
    device: Annotated[str, option(panel=_MAIN, help="auto, cpu, cuda:0, ...")] = "auto",
    devices: Annotated[
        str | None,
        option(
            panel=_MAIN,
            metavar="LIST",
            help=(
                "Images of a folder, or the tiles of one image, over several devices:"
                " cuda:0,cuda:1, or cpu,cpu for two workers on the CPU that share its threads and"
                " the budget."
            ),
        ),
    ] = None,
    plan_file: Annotated[
        Path | None,
        option(
            "--plan",
            panel=_MAIN,
            metavar="FILE",
            help=("Replay a plan from `lowtide plan upscale --json`, or from a report."),
        ),
    ] = None,
    dry_run: Annotated[
        bool, option("--dry-run", panel=_MAIN, help="Print the plan and stop.")
    ] = False,
    scale: Annotated[
        float | None,
        option(
            "-s",
            "--scale",
            panel=_SIZE,
            help=(
                "Size of the result relative to the input; resized after the model if necessary."
            ),
        ),
    ] = None,
    width: Annotated[
        int | None,
        option(
            panel=_SIZE,
            help=("Width of the result; the height follows unless --height is given too."),
        ),
    ] = None,
    height: Annotated[int | None, option(panel=_SIZE, help="Height of the result.")] = None,
    max_side: Annotated[int | None, option(panel=_SIZE, help="Longer side of the result.")] = None,
    self_ensemble: Annotated[
        bool,
        option(
            "--self-ensemble",
            panel=_MAIN,
            help=(
                "Run the model on eight rotations and flips of the image and average the results: a"
                " little closer to the original, in eight times the time."
            ),
        ),
    ] = False,
    precision: Annotated[
        Literal["auto", "fp32", "bf16", "fp16", "int8", "fp8"],
        option(
            panel=_TILES,
            help=(
                "auto is fp32 on the CPU and bf16 or fp16 on GPUs that gain from it. int8 computes"
                " linear layers in 8 bits, with torchao; fp8 does so on GPUs of compute capability"
                " 8.9 or higher, with everything else in bf16."
            ),
        ),
    ] = "auto",
    accuracy: Annotated[
        Literal["exact", "bounded", "fast"] | None,
        option(
            panel=_MAIN,
            help=(
                "exact: equal to the unconstrained run, or refused. bounded: tiles where nothing"
                " exact fits, and their error is measured. fast: whatever takes least time."
                " Default: exact, or bounded where tiles are requested."
            ),
        ),
    ] = None,
    strategy: Annotated[
        Literal["auto", "whole", "streamed", "tiled"],
        option(
            panel=_TILES,
            help=(
                "whole runs the image at once, streamed layer by layer over bands of rows, tiled in"
                " tiles."
            ),
        ),
    ] = "auto",
    cuda_graphs: Annotated[
        bool,
        option(
            "--cuda-graphs",
            panel=_TILES,
            help=(
                "Capture the network in a CUDA graph for the shape of its tiles and replay it: for"
                " light networks in small tiles. Takes the memory of a second run."
            ),
        ),
    ] = False,
    provider: Annotated[
        Literal["cpu", "tensorrt"],
        option(panel=_TILES, help=("Execution provider of ONNX Runtime for an .onnx file.")),
    ] = "cpu",
    compile: Annotated[
        Literal["auto", "on", "off"],
        option(
            panel=_TILES,
            help=(
                "torch.compile, which takes seconds to minutes before the first result. auto: where"
                " an earlier run with on was faster for this model."
            ),
        ),
    ] = "auto",
    tile: Annotated[
        int | None,
        option(panel=_TILES, metavar="PIXELS", help=("Side of the tiles, in input pixels.")),
    ] = None,
    tile_auto: Annotated[
        bool,
        option(
            "--tile-auto",
            panel=_TILES,
            help=("Let the plan choose the tiles: the default. Contradicts --tile."),
        ),
    ] = False,
    tile_overlap: Annotated[
        int | None,
        option(
            panel=_TILES,
            metavar="PIXELS",
            help=("Pixels that neighboring tiles share. Default: what the receptive field needs."),
        ),
    ] = None,
    tile_batch_size: Annotated[
        int | None, option(panel=_TILES, metavar="N", help=("Tiles of a row run at once."))
    ] = None,
    streams: Annotated[
        int,
        option(
            panel=_TILES,
            metavar="N",
            help=(
                "Images of a folder in flight: while one is computed, others are being written. On"
                " a GPU tiles of an image too: while one is computed, others are copied to and"
                " from it. As far as the budget allows. 1: one after another."
            ),
        ),
    ] = 2,
    hann_blend: Annotated[
        bool | None,
        option(
            "--hann-blend/--no-hann-blend",
            panel=_TILES,
            help=(
                "Blend neighboring tiles over part of their overlap."
                " Default: only where tiles differ from the whole image."
            ),
        ),
    ] = None,
    format: Annotated[
        str | None,
        option(
            panel=_FILES,
            metavar="NAME",
            help=(
                "png, jpg, webp, tif or avif, for results in a folder or without a suffix."
                " Default: as the input."
            ),
        ),
    ] = None,
    suffix: Annotated[
        str,
        option(
            panel=_FILES,
            metavar="TEXT",
            help=(
                "Insert this between name and extension of results that are named after inputs:"
                " _x2 makes photo_x2.png."
            ),
        ),
    ] = "",
    force: Annotated[
        bool, option("--force", panel=_FILES, help="Replace files and redo finished work.")
    ] = False,
    strip_metadata: Annotated[
        bool,
        option(
            "--strip-metadata",
            panel=_FILES,
            help=(
                "Remove EXIF, XMP, IPTC and resolution, but not the color profile, on which colors"
                " depend."
            ),
        ),
    ] = False,
    max_pixels: Annotated[
        int, option(panel=_FILES, help=("Refuse inputs with more pixels than this."))
    ] = 1_000_000_000,
    png_compression: Annotated[int, option(panel=_FILES, help="0 fast to 9 small.")] = 3,
    jpeg_quality: Annotated[int, option(panel=_FILES, help="1 to 100.")] = 95,
    webp_quality: Annotated[int, option(panel=_FILES, help="1 to 100.")] = 90,
    webp_lossless: Annotated[
        bool, option("--webp-lossless", panel=_FILES, help="Lossless WebP.")
    ] = False,
    avif_quality: Annotated[int, option(panel=_FILES, help="1 to 100.")] = 80,
    tiff_compression: Annotated[
        Literal["none", "lzw", "deflate"], option(panel=_FILES, help="Compression of TIFF files.")
    ] = "deflate",
    host_budget: Annotated[
        str | None,
        option(panel=_MAIN, help=("Host memory for a run on a GPU. Default: 60% of what is free.")),
    ] = None,
    disk_budget: Annotated[
        str | None,
        option(panel=_MAIN, help=("Disk for scratch files. Default: 90% of what is free.")),
    ] = None,
    scratch: Annotated[
        Path | None,
        option(panel=_FILES, help=("Folder for scratch files. Default: the output folder.")),
    ] = None,
    report: Annotated[
        bool,
        option(
            "--report", panel=_OUT, help=("Write a report next to each result, NAME.lowtide.json.")
        ),
    ] = False,
    as_json: Annotated[
        bool, option("--json", panel=_OUT, help="Print the report as JSON on stdout.")
    ] = False,
    quiet: Annotated[bool, option("-q", "--quiet", panel=_OUT, help="No progress.")] = False,
) -> None:
    """Upscale photographs within a memory budget.

    The result equals that of the unconstrained model unless the report says otherwise, and
    then it states the error. A stopped folder resumes where it was.
    """
    given = dict(locals())
    if tile_auto and tile is not None:
        raise UsageError("--tile-auto and --tile contradict each other", hint="drop one of them")
    if output is None and not dry_run:
        raise UsageError("no output is given", hint="add -o OUTPUT")
    settings = {name: value for name, value in given.items() if name not in _OWN}
    progress = ProgressLine(quiet=quiet)
    try:
        result = _work(inputs, output, dry_run, force, report, progress, settings)
    finally:
        progress.close()
    _show(result, as_json=as_json)


def _work(
    inputs: list[str],
    output: str | None,
    dry_run: bool,
    force: bool,
    sidecar: bool,
    progress: ProgressLine,
    settings: dict[str, Any],
) -> UpscaleReport:
    from lowtide.core.heap import tune_heap

    tune_heap()  # before the libraries load; no other code shares this process
    from lowtide.jobs.plan_upscale import plan
    from lowtide.jobs.upscale import upscale

    gc.freeze()  # keep library objects out of the collection before each image
    if dry_run:
        return plan(inputs, output or DEFAULT_OUTPUT, progress=progress, **settings)
    assert output is not None
    return upscale(inputs, output, force=force, sidecar=sidecar, progress=progress, **settings)


def _show(result: UpscaleReport, *, as_json: bool) -> None:
    from lowtide.cli.print_report import print_report, print_skipped_inputs

    print_skipped_inputs(result)
    print_result(result, lambda: print_report(result), result.raise_for_failures, as_json=as_json)
