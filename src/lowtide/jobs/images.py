"""The images of a job one after another, the next computed while the last is being written."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from lowtide.core.errors import ImageError, LowtideError, UsageError
from lowtide.core.hashing import file_sha256
from lowtide.jobs.context import Context
from lowtide.jobs.image import Computed, Work, compute_image
from lowtide.jobs.journal import Journal
from lowtide.jobs.report import ImageReport, UpscaleReport, write_sidecar
from lowtide.media.discover import Job


class Images:
    """Takes the images of a job and keeps ``report`` in their order.

    One that fails is reported, and the others are done; the error of a single one is raised.
    ``settings_key`` stands for all that decides the bytes of a result, apart from its input.
    """

    def __init__(
        self, context: Context, report: UpscaleReport, journal: Journal | None,
        settings_key: str, *, force: bool, sidecar: bool,
    ) -> None:  # fmt: skip
        self._context = replace(context, land=self._land)
        self._report, self._journal, self._key = report, journal, settings_key
        self._force, self._sidecar = force, sidecar
        self._done: dict[int, ImageReport] = {}
        self._keys: dict[int, str] = {}
        self._jobs: dict[int, Job] = {}

    def take(self, job: Job, index: int) -> None:
        """One image: skipped, failed with its reason, or computed and on its way to its file."""
        journal, context = self._journal, self._context
        self._jobs[index] = job
        begin: Callable[[], None] | None = None
        try:
            if journal is not None:
                key = f"{_content(job.source)}-{self._key}"
                if not self._force and journal.finished(job.target, key):
                    skipped = ImageReport(
                        input=str(job.source), output=str(job.target), status="skipped"
                    )
                    self._keep(index, skipped)
                    return
                self._keys[index] = key
                begin = functools.partial(journal.begin, job.target, key)

            refuse_overwriting(job.target, journal, self._force)
            computed = compute_image(context, Work(job.source, job.target, index, begin))
        except LowtideError as error:
            self._failed(index, error)
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

    def _land(self, computed: Computed) -> None:
        index = computed.work.index
        try:
            image = computed.land()
            if self._journal is not None:
                self._journal.done(computed.work.target, self._keys[index])
        except LowtideError as error:
            self._failed(index, error)
            return
        self._keep(index, image)

    def _failed(self, index: int, error: LowtideError) -> None:
        job = self._jobs[index]
        if self._journal is not None and index in self._keys:
            self._journal.forget(job.target)
        # A stop concerns the whole job; a single image has nobody else to go on for.
        if self._context.images == 1 or error.exit_code == 130:
            raise error
        self._keep(index, failed_image(job, error))

    def _keep(self, index: int, image: ImageReport) -> None:
        self._done[index] = image
        self._report.images = [self._done[place] for place in sorted(self._done)]
        if self._sidecar and image.status == "done":
            write_sidecar(self._report, image)


def _content(source: Path) -> str:
    try:
        return file_sha256(source)
    except OSError as error:
        raise ImageError(f"{source}: cannot be read: {error.strerror}") from error


def refuse_overwriting(target: Path, journal: Journal | None, force: bool) -> None:
    if force or not target.exists():
        return
    if journal is not None and journal.owns(target):
        raise UsageError(
            f"{target} was made from another input or with other settings, or changed since",
            hint="--force to make it again, or another output folder",
        )
    raise UsageError(f"{target} exists already", hint="--force to replace it")


def failed_image(job: Job, error: LowtideError) -> ImageReport:
    return ImageReport(
        input=str(job.source), output=str(job.target), status="failed",
        error=error.message, hint=error.hint,
    )  # fmt: skip
