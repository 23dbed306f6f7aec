"""What has become of the images of a job: in their order, in the journal, beside the files."""

from __future__ import annotations

import os
from bisect import bisect
from pathlib import Path

from lowtide.core.errors import ImageError, LowtideError, OutputError, UsageError
from lowtide.core.hashing import file_sha256
from lowtide.jobs.journal import Journal
from lowtide.jobs.report import ImageReport, UpscaleReport, sidecar_of, write_sidecar
from lowtide.media.discover import FilePair


class ResultRecorder:
    """Keeps ``report`` and ``journal`` of ``jobs``, which are called by their index from 1 on.

    One image that fails is reported, and the others are done; the error of a single one is raised.
    ``settings_key`` stands for all that decides the bytes of a result, apart from its input.
    """

    def __init__(
        self,
        jobs: list[FilePair],
        report: UpscaleReport,
        journal: Journal | None,
        settings_key: str,
        *,
        force: bool,
        sidecar: bool,
    ) -> None:
        self.jobs = jobs
        self._report, self._journal, self._key = report, journal, settings_key
        self._force, self._sidecar = force, sidecar
        self._kept: list[int] = []
        self._keys: dict[int, str] = {}

    def is_due(self, index: int) -> bool:
        """Whether the image has to be made; if not, that it is there or cannot be is kept."""
        job, journal = self.jobs[index - 1], self._journal
        try:
            if journal is not None:
                key = f"{_content(job.source)}-{self._key}"
                if not self._force and journal.finished(job.target, key):
                    skipped = ImageReport(
                        input=str(job.source), output=str(job.target), status="skipped"
                    )
                    self.keep(index, skipped)
                    return False
                self._keys[index] = key
            refuse_overwriting(job.target, journal, self._force)
        except LowtideError as error:
            self.failed(index, error)
            return False
        return True

    def new_part(self, index: int) -> Path | None:
        """The name of the file that is about to be made for the image; None if any will do."""
        journal = self._journal
        return None if journal is None else journal.new_part(self.jobs[index - 1].target)

    def begin(self, index: int) -> None:
        """The file is complete and about to get its name; raises where somebody else's has come to
        be there meanwhile."""
        target, journal = self.jobs[index - 1].target, self._journal
        if journal is None or not journal.owns(target):
            refuse_overwriting(target, journal, self._force)
        if journal is not None:
            journal.begin(target, self._keys[index])

    def done(self, index: int, image: ImageReport) -> None:
        """The file has its name."""
        if self._journal is not None:
            try:
                self._journal.done(self.jobs[index - 1].target, self._keys[index])
            except OutputError as error:
                # That it was begun is noted, by which the next run knows it.
                image.events.append(f"not noted as finished: {error.message}")
        self.keep(index, image)

    def failed(self, index: int, error: LowtideError) -> None:
        """The image could not be made; raises ``error`` where nobody else is to be gone on for."""
        job = self.jobs[index - 1]
        if self._journal is not None and index in self._keys:
            self._journal.forget(job.target)
        # A stop concerns the whole job.
        if len(self.jobs) == 1 or error.exit_code == 130:
            raise error
        self.keep(index, failed_image(job, error))

    def keep(self, index: int, image: ImageReport) -> None:
        """What became of one image."""
        if self._sidecar and image.status == "done":
            try:
                journal, path = self._journal, sidecar_of(image)
                part = None if journal is None else journal.new_part(path)
                write_sidecar(self._report, image, part)
            except OutputError as error:
                if len(self.jobs) == 1:
                    raise
                image.status, image.hint = "failed", error.hint
                image.error = f"its result is there, its report is not: {error.message}"
        place = bisect(self._kept, index)
        self._kept.insert(place, index)
        self._report.images.insert(place, image)


def failed_image(job: FilePair, error: LowtideError) -> ImageReport:
    """The report of an image that could not be made."""
    return ImageReport(
        input=str(job.source),
        output=str(job.target),
        status="failed",
        error=error.message,
        hint=error.hint,
    )


def _content(source: Path) -> str:
    try:
        return file_sha256(source)
    except OSError as error:
        raise ImageError(f"{source}: cannot be read: {error.strerror}") from error


def refuse_overwriting(target: Path, journal: Journal | None, force: bool) -> None:
    """Raise `UsageError` where ``target`` is there and may not be replaced."""
    if force or not os.path.lexists(target):  # a link to nowhere is somebody's too
        return
    if journal is not None and journal.owns(target):
        raise UsageError(
            f"{target} was made from another input or with other settings, or changed since",
            hint="--force to make it again, or another output folder",
        )
    raise UsageError(f"{target} exists already", hint="--force to replace it")
