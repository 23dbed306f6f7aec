"""The images of a job one after another, the next computed while the last is being written."""

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
    """Where it is told what has become of an image."""

    def new_part(self, index: int) -> Path | None:
        """The name of the file that is about to be made for it; None if any will do."""
        ...

    def begin(self, index: int) -> None:
        """The file is complete and about to get its name."""
        ...

    def done(self, index: int, image: ImageReport) -> None:
        """The file has its name."""
        ...

    def failed(self, index: int, error: LowtideError) -> None:
        """The image could not be made."""
        ...


class ImageQueue:
    """Computes images and sees to it that they get their names; ``kept`` is told of each."""

    def __init__(self, context: UpscaleSession, kept: ResultListener) -> None:
        self._context, self._kept = replace(context, land=self._land), kept

    def take(self, source: Path, target: Path, index: int) -> None:
        """Compute one image. It is on its way to its file then, or there, or has failed."""
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
        """Wait until all are written."""
        self._context.land_all()

    def drop(self) -> None:
        """Leave nothing unfinished behind; harmless after `finish`."""
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
