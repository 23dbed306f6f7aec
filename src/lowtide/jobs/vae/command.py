"""Videos to latents and back by a video autoencoder, within a budget: what commands call."""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

from lowtide.core.progress import Cancel, ProgressCallback
from lowtide.jobs.engine.settings import show_keywords
from lowtide.jobs.vae.job import run_vae
from lowtide.jobs.vae.report import VaeReport
from lowtide.jobs.vae.settings import VaeKeywords, VaeSettings


@show_keywords(VaeSettings, VaeKeywords)
def encode(
    source: str | Path,
    output: str | Path,
    *,
    dry_run: bool = False,
    force: bool = False,
    sidecar: bool = False,
    progress: ProgressCallback | None = None,
    cancel: Cancel = None,
    **settings: Unpack[VaeKeywords],
) -> VaeReport:
    """Encode a video to latents, a ``.safetensors`` file with the key ``latents``.

    They are (1, C, n, h, w), not scaled, and the file says what `decode` needs to make the video
    again: its frames, size and time stamps. Accuracy class: exact. A run that was stopped goes on
    when it is called again, behind the last segment that it finished.

    Args:
        source: Video file.
        output: File of the latents.
        dry_run: Plan, but run nothing and write no result.
        force: Replace ``output``.
        sidecar: Write a report next to ``output``.
        progress: Called after each chunk of frames.
        cancel: Stops the work with `Cancelled`.
        settings: Model, budget and all else, as fields of `VaeSettings`.

    Raises:
        UsageError: An argument is invalid, or the model is of a kind that does not run in bands.
        VideoError: The video is damaged, or of a kind that is not supported.
        ModelError: The model cannot be loaded.
        BudgetError: Nothing fits the budget.
        NotFiniteError: The model returned NaN or infinity.
        OutputError: The file cannot be written, or another run writes it.
        Cancelled: ``cancel`` was set.
    """
    return run_vae(
        "encode",
        source,
        output,
        VaeSettings.of(**settings),
        dry_run=dry_run,
        force=force,
        sidecar=sidecar,
        progress=progress,
        cancel=cancel,
    )


@show_keywords(VaeSettings, VaeKeywords)
def decode(
    source: str | Path,
    output: str | Path,
    *,
    dry_run: bool = False,
    force: bool = False,
    sidecar: bool = False,
    progress: ProgressCallback | None = None,
    cancel: Cancel = None,
    **settings: Unpack[VaeKeywords],
) -> VaeReport:
    """Decode latents, a ``.safetensors`` file with the key ``latents``, to a video without sound.

    Frames, their size and their time stamps are those that the file says. Latents of another
    program become all frames that they make, at ``fps``. Accuracy class: exact. Goes on as
    `encode`.

    Args:
        source: File of latents (1, C, n, h, w), not scaled.
        output: Video file.
        dry_run: As `encode`.
        force: As `encode`.
        sidecar: As `encode`.
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
    return run_vae(
        "decode",
        source,
        output,
        VaeSettings.of(**settings),
        dry_run=dry_run,
        force=force,
        sidecar=sidecar,
        progress=progress,
        cancel=cancel,
    )


@show_keywords(VaeSettings, VaeKeywords)
def roundtrip(
    source: str | Path,
    output: str | Path | None = None,
    *,
    dry_run: bool = False,
    force: bool = False,
    sidecar: bool = False,
    progress: ProgressCallback | None = None,
    cancel: Cancel = None,
    **settings: Unpack[VaeKeywords],
) -> VaeReport:
    """Encode a video, decode it again, and compare the frames with those that went in.

    With an ``output`` it goes on as `encode`; without one it starts over.

    Args:
        source: Video file.
        output: Video file of the decoded frames, with the sound of the source; None for none.
        dry_run: As `encode`.
        force: As `encode`.
        sidecar: As `encode`.
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
    return run_vae(
        "roundtrip",
        source,
        output,
        VaeSettings.of(**settings),
        dry_run=dry_run,
        force=force,
        sidecar=sidecar,
        progress=progress,
        cancel=cancel,
    )
