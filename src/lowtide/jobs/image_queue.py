"""Queue of a job's images: one is computed while earlier ones are being written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

from lowtide.core.errors import LowtideError
from lowtide.jobs.finish import ComputedImage, ImageJob
from lowtide.jobs.report import ImageReport
from lowtide.jobs.run_image import run_image
from lowtide.jobs.session import UpscaleSession


class ResultListener(Protocol):
    """Protocol of the callbacks for each image's result."""

    def new_part(self, index: int) -> Path | None:
        """Return a temporary name for the file of image ``index``; None for a random one."""
        ...

    def begin(self, index: int) -> None:
        """Handle a complete file, before it is renamed to its target."""
        ...

    def done(self, index: int, image: ImageReport) -> None:
        """Handle a file that has its final name."""
        ...

    def failed(self, index: int, error: LowtideError) -> None:
        """Handle a failed image."""
        ...


class ImageQueue:
    """Compute images, commit their files and report each result to ``kept``."""

    def __init__(self, context: UpscaleSession, kept: ResultListener) -> None:
        self._context, self._kept = replace(context, land=self._land), kept

    def take(self, source: Path, target: Path, index: int) -> None:
        """Compute one image; on return it is being written, done or failed."""
        context = self._context
        begin: Callable[[], None] = partial(self._kept.begin, index)
        try:
            part = self._kept.new_part(index)
            computed = run_image(context, ImageJob(source, target, index, begin, part))
        except LowtideError as error:
            self._kept.failed(index, error)
            return
        if context.images == 1 or context.settings.streams == 1:
            self._land(computed)
        else:
            context.flying.append(computed)

    def finish(self) -> None:
        """Wait until all images are written."""
        self._context.land_all()

    def drop(self) -> None:
        """Abort all unfinished files; no effect after `finish`."""
        while self._context.flying:
            self._context.flying.pop().sink.abort()

    def _land(self, computed: ComputedImage) -> None:
        index = computed.work.index
        try:
            image = computed.land()
        except LowtideError as error:
            self._kept.failed(index, error)
            return
        self._kept.done(index, image)
