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
    """Compute images, commit their files and report each result to ``listener``."""

    def __init__(self, session: UpscaleSession, listener: ResultListener) -> None:
        self._session, self._listener = replace(session, commit=self._commit), listener

    def submit(self, source: Path, target: Path, index: int) -> None:
        """Compute one image; on return it is being written, done or failed."""
        session = self._session
        begin: Callable[[], None] = partial(self._listener.begin, index)
        try:
            part = self._listener.new_part(index)
            computed = run_image(session, ImageJob(source, target, index, begin, part))
        except LowtideError as error:
            self._listener.failed(index, error)
            return
        if session.images == 1 or session.settings.streams == 1:
            self._commit(computed)
        else:
            session.in_flight.append(computed)

    def finish(self) -> None:
        """Wait until all images are written."""
        self._session.commit_all()

    def abort(self) -> None:
        """Abort all unfinished files; no effect after `finish`."""
        while self._session.in_flight:
            self._session.in_flight.pop().sink.abort()

    def _commit(self, computed: ComputedImage) -> None:
        index = computed.job.index
        try:
            image = computed.commit()
        except LowtideError as error:
            self._listener.failed(index, error)
            return
        self._listener.done(index, image)
