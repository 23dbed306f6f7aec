"""Comparisons after a denoising run: scores against clean files, and a picture."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np

from lowtide.core.errors import UsageError
from lowtide.core.progress import Cancel, check_cancel
from lowtide.jobs.denoise.picture import draw_comparison, non_local_means
from lowtide.jobs.denoise.report import DenoiseReport
from lowtide.jobs.denoise.scores import find_references, score_files
from lowtide.jobs.engine.report import write_sidecar
from lowtide.jobs.images.detail_picture import require_comparison
from lowtide.jobs.images.job import ImageJob
from lowtide.jobs.images.run import Inputs, find_jobs
from lowtide.jobs.images.settings import ImageSettings
from lowtide.media.discover import IMAGES, MediaKind


@dataclass(frozen=True)
class Comparisons:
    """Clean files by input, and the path of a picture; both may be absent.

    ``force`` is whether a file at that path is replaced.
    """

    settings: ImageSettings
    references: dict[str, Path] = field(default_factory=dict)
    picture: Path | None = None
    force: bool = False

    @classmethod
    def find(
        cls,
        kind: MediaKind,
        inputs: Inputs,
        output: str | Path,
        settings: ImageSettings,
        reference: str | Path | None,
        picture: str | Path | None,
        *,
        force: bool,
    ) -> Self:
        """Check all that a comparison of files of a kind needs, before anything runs.

        Raises:
            UsageError: The kind is not that of photographs, a clean file is missing, or the picture
                cannot be made.
            ImageError: A clean file cannot be read, or has another size than its input.
        """
        if reference is None and picture is None:
            return cls(settings)
        if kind is not IMAGES:
            raise UsageError(
                f"--reference and --comparison are for images, not for a {kind.noun}",
                hint="drop them",
            )
        found, _ = find_jobs(inputs, output, settings, ImageJob)
        references = {}
        if reference is not None:
            references = find_references(found.pairs, Path(reference), settings.max_pixels)
        if picture is not None:
            require_comparison(Path(picture), found, references.values(), force=force)
            non_local_means(np.zeros((8, 8, 1)), 0.1)  # which may not be installed
        return cls(settings, references, None if picture is None else Path(picture), force)

    def make(self, report: DenoiseReport, *, sidecar: bool, cancel: Cancel) -> None:
        """Add scores to the images of ``report`` and their sidecar files, and draw the picture.

        Images that an earlier run finished are scored too.
        """
        if not self.references and self.picture is None:
            return
        limit = self.settings.max_pixels
        scratch = Path(self.settings.scratch) if self.settings.scratch else None
        for image in report.images:
            check_cancel(cancel)
            reference = self.references.get(image.input)
            if reference is not None and image.status in ("done", "skipped"):
                files = Path(image.input), Path(image.output), reference
                image.scores = score_files(*files, limit, scratch)
                if sidecar and image.status == "done":
                    write_sidecar(report, image)
            if self.picture is not None:
                files = self.picture, image, reference
                draw_comparison(*files, limit, scratch, replace=self.force)
