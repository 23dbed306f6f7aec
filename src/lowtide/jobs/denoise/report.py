"""Report of a denoising job."""

from __future__ import annotations

from pydantic import Field, SerializeAsAny

from lowtide.core.errors import ImageError
from lowtide.jobs.denoise.scores import DenoiseScores
from lowtide.jobs.engine.report import JobReport
from lowtide.jobs.images.report import NoisyImageReport


class DenoisedImageReport(NoisyImageReport):
    """Result of one image that was denoised: its noise level, and what was done.

    ``strength``, ``chroma_only``, ``mask`` and ``preview`` are those of the settings. ``scores``
    are those against a clean image, where one was given.
    """

    strength: float = 1.0
    chroma_only: bool = False
    mask: str | None = None
    preview: tuple[int, int, int, int] | None = None
    scores: DenoiseScores | None = None

    def control(self) -> list[tuple[str, str]]:
        """Return what of the image was denoised, and how far, if not all and wholly."""
        words = [f"strength {self.strength:g}"] if self.strength != 1 else []
        words += ["colors alone"] if self.chroma_only else []
        words += [f"where {self.mask} is white"] if self.mask else []
        if self.preview is not None:
            left, top, width, height = self.preview
            words.append(f"a preview of {width}×{height} pixels at {left},{top}")
        return [("control", "; ".join(words))] if words else []

    def details(self) -> list[tuple[str, str]]:
        """Return the noise level, what was denoised of it, and scores."""
        scores = [] if self.scores is None else self.scores.details()
        return super().details() + self.control() + scores


class DenoiseReport(JobReport):
    """Report of a denoising job."""

    item_type = DenoisedImageReport
    noun = "images"
    input_error = ImageError

    images: list[SerializeAsAny[DenoisedImageReport]] = Field(default=[])
