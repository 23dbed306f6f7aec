"""Videos to latents and back by a video autoencoder, within a budget: the jobs behind commands."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.core.atomic_file import require_absent
from lowtide.core.errors import InputError, UsageError
from lowtide.core.progress import Cancel, ProgressCallback
from lowtide.integrations.clip_autoencoder import ClipAutoencoder, PartName
from lowtide.jobs.clip_frames import (
    clip_facts,
    compare_clips,
    default_facts,
    read_clip,
    task_of_latents,
    write_clip,
)
from lowtide.jobs.latent_files import ClipFacts, read_latents, write_latents
from lowtide.jobs.vae_report import VaeReport
from lowtide.jobs.vae_run import VaeRun
from lowtide.jobs.vae_settings import VaeSettings
from lowtide.jobs.video_task import VideoTask, video_task
from lowtide.media.video.frame_pattern import FramePattern

if TYPE_CHECKING:
    from torch import Tensor

_USUAL_FPS = 25.0
# A video that is never written, where only how frames are read is asked for.
_UNWRITTEN = Path("frames.mkv")


def encode(
    source: str | Path,
    output: str | Path,
    *,
    dry_run: bool = False,
    force: bool = False,
    progress: ProgressCallback | None = None,
    cancel: Cancel = None,
    **settings: Any,
) -> VaeReport:
    """Encode a video to latents, a ``.safetensors`` file with the key ``latents``.

    They are (1, C, n, h, w), not scaled, and the file says what `decode` needs to make the video
    again: its frames, size and time stamps. Accuracy class: exact.

    Args:
        source: Video file.
        output: File of the latents.
        dry_run: Plan, but run and write nothing.
        force: Replace ``output``.
        progress: Called after each frame that is read.
        cancel: Stops the work with `Cancelled`.
        settings: Model, budget and all else, as fields of `VaeSettings`.

    Raises:
        UsageError: An argument is invalid, or the model is of a kind that does not run in bands.
        VideoError: The video is damaged, or of a kind that is not supported.
        ModelError: The model cannot be loaded.
        BudgetError: Nothing fits the budget.
        NotFiniteError: The model returned NaN or infinity.
        OutputError: The file cannot be written.
        Cancelled: ``cancel`` was set.
    """
    source, output = Path(source), _latent_name(output)
    chosen = VaeSettings.of(**settings)
    if not dry_run:
        require_absent(output, force=force)
    _require_videos(source)
    task = _read_only(source, chosen)
    run = VaeRun.load(chosen, progress, cancel)
    common = _of_clip(run.autoencoder, task) | {
        "operation": "encode",
        "input": str(source),
        "output": str(output),
        "notes": list(task.facts.notes),
    }
    if dry_run:
        return run.report(status="planned", plans=_plans(run, ("encoder",), common), **common)
    with run.phase("read", f"reading {source.name}", task.frames) as after_frame:
        clip = read_clip(task, after_frame)
    latents = run.encode(clip, source.name, common["latents"][1])
    del clip
    facts = clip_facts(
        task,
        model=run.autoencoder.kind,
        scaling=run.autoencoder.scaling,
        posterior="sample" if chosen.sample else "mean",
        seed=chosen.seed if chosen.sample else None,
    )
    with run.phase("write", f"writing {output.name}", 1):
        write_latents(output, latents, facts)
    return run.report(status="done", **common)


def decode(
    source: str | Path,
    output: str | Path,
    *,
    dry_run: bool = False,
    force: bool = False,
    progress: ProgressCallback | None = None,
    cancel: Cancel = None,
    **settings: Any,
) -> VaeReport:
    """Decode latents, a ``.safetensors`` file with the key ``latents``, to a video without sound.

    Frames, their size and their time stamps are those that the file says. Latents of another
    program become all frames that they make, at ``fps``. Accuracy class: exact.

    Args:
        source: File of latents (1, C, n, h, w), not scaled.
        output: Video file.
        dry_run: As `encode`.
        force: As `encode`.
        progress: Called after each frame that is written.
        cancel: As `encode`.
        settings: As `encode`.

    Raises:
        InputError: There are no latents, or such that are not finite or not of this model.
        UsageError: As `encode`, or the encoder or the container cannot hold the video.
        ModelError: As `encode`.
        BudgetError: As `encode`.
        NotFiniteError: As `encode`.
        OutputError: As `encode`.
        Cancelled: As `encode`.
    """
    source, output = Path(source), Path(output)
    chosen = VaeSettings.of(**settings)
    if not dry_run:
        require_absent(output, force=force)
    _require_videos(output)
    latents, said = read_latents(source)
    run = VaeRun.load(chosen, progress, cancel)
    facts = _checked_facts(source, run.autoencoder, latents, said, chosen)
    encoder = chosen.video_settings().encoder_settings(facts.picture.bits, output)
    task = task_of_latents(source, output, facts, encoder)
    common = {
        "operation": "decode",
        "input": str(source),
        "output": str(output),
        "frames": facts.frames,
        "width": facts.width,
        "height": facts.height,
        "latents": tuple(latents.shape[1:]),
        "notes": list(task.notes),
    }
    if dry_run:
        return run.report(status="planned", plans=_plans(run, ("decoder",), common), **common)
    frames = run.decode(latents, source.name)
    frames = frames[:, :, : facts.frames, : facts.height, : facts.width]
    with run.phase("write", f"writing {output.name}", facts.frames) as after_frame:
        common["notes"] += write_clip(frames, task, output, after_frame=after_frame, cancel=cancel)
    return run.report(status="done", **common)


def roundtrip(
    source: str | Path,
    output: str | Path | None = None,
    *,
    dry_run: bool = False,
    force: bool = False,
    progress: ProgressCallback | None = None,
    cancel: Cancel = None,
    **settings: Any,
) -> VaeReport:
    """Encode a video, decode it again, and compare the frames with those that went in.

    Args:
        source: Video file.
        output: Video file of the decoded frames, with the sound of the source; None for none.
        dry_run: As `encode`.
        force: As `encode`.
        progress: Called after each frame that is read or written.
        cancel: As `encode`.
        settings: As `encode`.

    Raises:
        VideoError: As `encode`.
        UsageError: As `decode`.
        ModelError: As `encode`.
        BudgetError: As `encode`.
        NotFiniteError: As `encode`.
        OutputError: As `encode`.
        Cancelled: As `encode`.
    """
    source, target = Path(source), None if output is None else Path(output)
    chosen = VaeSettings.of(**settings)
    if target is not None and not dry_run:
        require_absent(target, force=force)
    _require_videos(source, target)
    if target is None:
        task = _read_only(source, chosen)
    else:
        task = video_task(source, target, chosen.video_settings(), 1)
    run = VaeRun.load(chosen, progress, cancel)
    common = _of_clip(run.autoencoder, task) | {
        "operation": "roundtrip",
        "input": str(source),
        "output": None if target is None else str(target),
        "notes": list(task.notes if target else task.facts.notes),
    }
    if dry_run:
        names = ("encoder", "decoder")
        return run.report(status="planned", plans=_plans(run, names, common), **common)
    with run.phase("read", f"reading {source.name}", task.frames) as after_frame:
        clip = read_clip(task, after_frame)
    latents = run.encode(clip, source.name, common["latents"][1])
    made = run.decode(latents, source.name)
    made = made[:, :, : clip.shape[2], : clip.shape[3], : clip.shape[4]]
    common |= compare_clips(made, clip)
    if target is not None:
        with run.phase("write", f"writing {target.name}", task.frames) as after_frame:
            common["notes"] += write_clip(
                made, task, target, after_frame=after_frame, cancel=cancel
            )
    return run.report(status="done", **common)


def _require_videos(*paths: Path | None) -> None:
    """Raise `UsageError` for names of sequences of images."""
    for path in paths:
        if path is not None and not path.exists() and FramePattern.parse(path) is not None:
            raise UsageError(
                f"{path} is a sequence of images, and lowtide vae takes and makes video files",
                hint="lowtide video makes one of the other",
            )


def _read_only(source: Path, settings: VaeSettings) -> VideoTask:
    """Return how frames are read, of any size: no encoder will have to hold them."""
    lossless = replace(settings, codec="ffv1", quality=None, preset=None)
    return video_task(source, _UNWRITTEN, lossless.video_settings(), 1)


def _latent_name(output: str | Path) -> Path:
    output = Path(output)
    if output.suffix != ".safetensors":
        raise UsageError(
            f"{output} is no name of latents", hint=f"name it {output.with_suffix('.safetensors')}"
        )
    return output


def _of_clip(autoencoder: ClipAutoencoder, task: VideoTask) -> dict[str, Any]:
    """Return what a report says of the frames of a video and their latents."""
    shape = task.frames, task.stored.height, task.stored.width
    time_ratio, space = autoencoder.ratios
    frames, height, width = autoencoder.padded(shape)
    latents = 1 + (frames - 1) // time_ratio, height // space, width // space
    return {
        "frames": task.frames,
        "height": task.stored.height,
        "width": task.stored.width,
        "latents": (autoencoder.latent_channels, *latents),
    }


def _plans(run: VaeRun, names: tuple[PartName, ...], common: dict[str, Any]) -> dict[str, str]:
    """Return by part how it would run."""
    latents = common["latents"][1:]
    clip = run.autoencoder.padded((common["frames"], common["height"], common["width"]))
    shapes = {"encoder": clip, "decoder": latents}
    return {name: run.autoencoder.explain(name, shapes[name]) for name in names}


def _checked_facts(
    source: Path,
    autoencoder: ClipAutoencoder,
    latents: Tensor,
    said: ClipFacts | None,
    settings: VaeSettings,
) -> ClipFacts:
    """Return what latents say of their clip; raises `InputError` if they are of another model."""
    channels, number, height, width = latents.shape[1:]
    if channels != autoencoder.latent_channels:
        raise InputError(
            f"{source} has latents of {channels} channels, and those of this {autoencoder.kind}"
            f" have {autoencoder.latent_channels}"
        )
    made = autoencoder.made((number, height, width))
    if said is None:
        return default_facts(*made, settings.fps or _USUAL_FPS)
    if said.model != autoencoder.kind:
        raise InputError(
            f"{source} has latents of {said.model}, and the model is {autoencoder.kind}"
        )
    if autoencoder.padded((said.frames, said.height, said.width)) != made:
        raise InputError(
            f"{source}: {number} latents of {height}×{width} make {made[0]} frames of"
            f" {made[1]}×{made[2]}, not the {said.frames} of {said.height}×{said.width} it names"
        )
    if settings.fps is not None:
        raise UsageError(f"{source} says when its frames are shown", hint="drop --fps")
    return said
