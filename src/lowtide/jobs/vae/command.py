"""Videos to latents and back by a video autoencoder, within a budget: the jobs behind commands."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from lowtide.core.atomic_file import require_distinct, require_output
from lowtide.core.progress import Cancel, ProgressCallback
from lowtide.jobs.clips.task import VideoTask, video_task
from lowtide.jobs.engine.settings import show_keywords
from lowtide.jobs.vae.clip_facts import facts_of_clip, task_of_latents
from lowtide.jobs.vae.comparison import ClipComparison
from lowtide.jobs.vae.inputs import (
    ClipShapes,
    checked_facts,
    latent_path,
    read_only_task,
    require_videos,
)
from lowtide.jobs.vae.job import PartNeeds, VaeRun
from lowtide.jobs.vae.latent_files import read_latents, write_latents
from lowtide.jobs.vae.memory import comparing_row, latents_row, reading_row, writing_row
from lowtide.jobs.vae.report import VaeReport
from lowtide.jobs.vae.settings import VaeKeywords, VaeSettings

if TYPE_CHECKING:
    import numpy as np


@show_keywords(VaeSettings, VaeKeywords)
def encode(
    source: str | Path,
    output: str | Path,
    *,
    dry_run: bool = False,
    force: bool = False,
    progress: ProgressCallback | None = None,
    cancel: Cancel = None,
    **settings: Unpack[VaeKeywords],
) -> VaeReport:
    """Encode a video to latents, a ``.safetensors`` file with the key ``latents``.

    They are (1, C, n, h, w), not scaled, and the file says what `decode` needs to make the video
    again: its frames, size and time stamps. Accuracy class: exact.

    Args:
        source: Video file.
        output: File of the latents.
        dry_run: Plan, but run and write nothing.
        force: Replace ``output``.
        progress: Called after each chunk of frames.
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
    source, output = Path(source), latent_path(output)
    chosen = VaeSettings.of(**settings)
    if not dry_run:
        require_output(output, force=force)
        require_distinct([output], [source])
    require_videos(source)
    task = read_only_task(source, chosen)
    run = VaeRun.load(chosen, progress, cancel)
    shapes = ClipShapes.of_video(run.autoencoder, task)
    run.plan(_encoder_needs(run, task, shapes))
    run.notes += task.facts.notes
    common = {"operation": "encode", "input": str(source), "output": str(output)}
    common |= shapes.for_report()
    if dry_run:
        return run.report(**common)
    with run.measured():
        latents = run.encode(task, shapes.latents)
        facts = facts_of_clip(
            task,
            model=run.autoencoder.kind,
            scaling=run.autoencoder.scaling,
            posterior="sample" if chosen.sample else "mean",
            seed=chosen.seed if chosen.sample else None,
        )
        with run.clock.phase("write"):
            write_latents(output, latents, facts, replace=force)
    return run.report(**common)


@show_keywords(VaeSettings, VaeKeywords)
def decode(
    source: str | Path,
    output: str | Path,
    *,
    dry_run: bool = False,
    force: bool = False,
    progress: ProgressCallback | None = None,
    cancel: Cancel = None,
    **settings: Unpack[VaeKeywords],
) -> VaeReport:
    """Decode latents, a ``.safetensors`` file with the key ``latents``, to a video without sound.

    Frames, their size and their time stamps are those that the file says. Latents of another
    program become all frames that they make, at ``fps``. Accuracy class: exact.

    Args:
        source: File of latents (1, C, n, h, w), not scaled.
        output: Video file.
        dry_run: As `encode`.
        force: As `encode`.
        progress: As `encode`.
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
        require_output(output, force=force, makes_folder=True)
        require_distinct([output], [source])
    require_videos(output)
    latents, stated = read_latents(source)
    run = VaeRun.load(chosen, progress, cancel)
    facts = checked_facts(source, run.autoencoder, latents, stated, chosen)
    encoder = chosen.video_settings().encoder_settings(facts.picture.bits, output)
    task = task_of_latents(source, output, facts, encoder)
    shapes = ClipShapes.of_latents(latents, facts, run.autoencoder)
    run.plan(_decoder_needs(run, task, shapes, writes=True))
    run.notes += task.notes
    common = {"operation": "decode", "input": str(source), "output": str(output)}
    common |= shapes.for_report()
    if dry_run:
        return run.report(**common)
    with run.measured(), run.writer(task, output, replace=force) as write:
        run.decode(latents, task, write)
    return run.report(**common)


@show_keywords(VaeSettings, VaeKeywords)
def roundtrip(
    source: str | Path,
    output: str | Path | None = None,
    *,
    dry_run: bool = False,
    force: bool = False,
    progress: ProgressCallback | None = None,
    cancel: Cancel = None,
    **settings: Unpack[VaeKeywords],
) -> VaeReport:
    """Encode a video, decode it again, and compare the frames with those that went in.

    Args:
        source: Video file.
        output: Video file of the decoded frames, with the sound of the source; None for none.
        dry_run: As `encode`.
        force: As `encode`.
        progress: As `encode`.
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
        require_output(target, force=force, makes_folder=True)
        require_distinct([target], [source])
    require_videos(source, target)
    if target is None:
        task = read_only_task(source, chosen)
    else:
        task = video_task(source, target, chosen.video_settings(), 1)
    run = VaeRun.load(chosen, progress, cancel)
    shapes = ClipShapes.of_video(run.autoencoder, task)
    decoding = _decoder_needs(run, task, shapes, writes=target is not None, compares=True)
    run.plan(_encoder_needs(run, task, shapes), decoding)
    run.notes += task.notes if target else task.facts.notes
    common = {"operation": "roundtrip", "input": str(source)}
    common |= {"output": None if target is None else str(target), **shapes.for_report()}
    if dry_run:
        return run.report(**common)
    with run.measured(), ClipComparison(task, cancel) as comparison:
        latents = run.encode(task, shapes.latents)
        with ExitStack() as stack:
            uses: list[Callable[[np.ndarray], object]] = [
                run.clock.timed("compare", comparison.add)
            ]
            if target is not None:
                uses.append(stack.enter_context(run.writer(task, target, replace=force)))

            def use(image: np.ndarray) -> None:
                for one in uses:
                    one(image)

            run.decode(latents, task, use)
    return run.report(**common, **comparison.figures())


def _encoder_needs(run: VaeRun, task: VideoTask, shapes: ClipShapes) -> PartNeeds:
    frames = run.autoencoder.chunk_frames("encoder")
    rows = latents_row(shapes.latents, run.place), reading_row(task, frames, run.place)
    return PartNeeds("encoder", shapes.padded, rows)


def _decoder_needs(
    run: VaeRun, task: VideoTask, shapes: ClipShapes, *, writes: bool, compares: bool = False
) -> PartNeeds:
    frames = run.autoencoder.chunk_frames("decoder")
    rows = [latents_row(shapes.latents, run.place)]
    if writes:
        rows.append(writing_row(task, frames, run.place))
    if compares:
        rows.append(comparing_row(task, frames, run.place))
    return PartNeeds("decoder", shapes.latents[1:], rows)
