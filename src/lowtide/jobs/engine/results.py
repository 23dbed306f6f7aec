"""Record the results of items in the report, the journal and sidecar files."""

from __future__ import annotations

import os
from bisect import bisect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lowtide.core.atomic_file import require_output
from lowtide.core.errors import LowtideError, OutputError, UsageError, describe_changes
from lowtide.core.input_file import file_sha256
from lowtide.jobs.engine.item import JobItem
from lowtide.jobs.engine.journal import JobJournal
from lowtide.jobs.engine.report import ItemReport, JobReport, sidecar_path, write_sidecar
from lowtide.media.discover import FilePair


class ResultRecorder:
    """Record the results of ``pairs`` in ``report`` and ``journal``, by index from 1.

    An item that fails is reported and the others go on; the error of a single item is raised.
    ``settings_key`` is a hash of all that determines the bytes of a result, except its input, and
    ``made_with`` says what that is.
    """

    def __init__(
        self,
        pairs: list[FilePair],
        report: JobReport,
        journal: JobJournal | None,
        settings_key: str,
        *,
        force: bool,
        sidecar: bool,
        made_with: dict[str, Any] | None = None,
    ) -> None:
        self._made_with = made_with
        self.pairs, self.item_type = pairs, report.item_type
        self.report, self._journal, self._key = report, journal, settings_key
        self.force, self._sidecar = force, sidecar
        self._recorded: list[int] = []
        self._keys: dict[int, str] = {}

    def is_due(self, index: int) -> bool:
        """Return whether an item has to be computed; if not, record why."""
        pair, journal = self.pairs[index - 1], self._journal
        try:
            if journal is not None:
                key = f"{self._content(pair.source)}-{self._key}"
                if not self.force and journal.is_finished(pair.target, key):
                    source, target = str(pair.source), str(pair.target)
                    skipped = self.item_type(input=source, output=target, status="skipped")
                    self.record(index, skipped)
                    return False
                self._keys[index] = key
                if not self.force and os.path.lexists(pair.target) and journal.owns(pair.target):
                    raise UsageError(
                        f"{pair.target} {self._why_other(journal, pair.target, key)}",
                        hint="--force to replace it, or another output folder",
                    )
            require_output(pair.target, force=self.force, makes_folder=True)
            if self._sidecar:
                require_output(sidecar_path(pair.target), force=True, makes_folder=True)
        except LowtideError as error:
            self.failed(index, error)
            return False
        return True

    def due_items(self) -> Iterator[JobItem]:
        """Iterate over the items that have to be computed."""
        for index, pair in enumerate(self.pairs, start=1):
            if self.is_due(index):
                yield JobItem(pair.source, pair.target, index, replace=self.force)

    def new_part(self, index: int) -> Path | None:
        """Return a temporary name for the item's file; None for a random one."""
        journal = self._journal
        return None if journal is None else journal.new_part(self.pairs[index - 1].target)

    def begin(self, index: int) -> None:
        """Record that the complete file is about to be renamed to its target.

        Raises if another program has created the target meanwhile.
        """
        target, journal = self.pairs[index - 1].target, self._journal
        if journal is None or not journal.owns(target):
            require_output(target, force=self.force, makes_folder=True)
        if journal is not None:
            if self._made_with is not None:
                journal.note_settings(self._key, self._made_with)
            journal.begin(target, self._keys[index])

    def done(self, index: int, item: ItemReport) -> None:
        """Record that the file has its final name."""
        if self._journal is not None:
            try:
                self._journal.done(self.pairs[index - 1].target, self._keys.pop(index))
            except OutputError as error:
                # Its `begin` record is enough for the next run to find it complete.
                item.events.append(f"not recorded as finished: {error.message}")
        self.record(index, item)

    def failed(self, index: int, error: LowtideError) -> None:
        """Record a failed item; raises ``error`` for a single item or a stop."""
        if self._journal is not None and index in self._keys:
            self._journal.undo_begin(self.pairs[index - 1].target)
        # A stop ends the whole job.
        if len(self.pairs) == 1 or error.exit_code == 130:
            raise error
        pair = self.pairs[index - 1]
        self.record(index, self.item_type.of_failure(pair.source, pair.target, error))

    def record(self, index: int, item: ItemReport) -> None:
        """Put the report of an item in its place."""
        if self._sidecar and item.status in ("done", "planned"):
            try:
                journal, path = self._journal, sidecar_path(item.output)
                part = None if journal is None else journal.new_part(path)
                write_sidecar(self.report, item, part)
            except OutputError as error:
                if len(self.pairs) == 1:
                    raise
                made = "it was planned" if item.status == "planned" else "its result was written"
                item.status, item.hint = "failed", error.hint
                item.error = f"{made}, its report was not written: {error.message}"
        place = bisect(self._recorded, index)
        self._recorded.insert(place, index)
        self.report.items.insert(place, item)

    def _why_other(self, journal: JobJournal, target: Path, key: str) -> str:
        """Return why a file that ``journal`` made is not the result of ``key``."""
        (content, _, settings), now = journal.key_of(target).partition("-"), key.partition("-")
        if settings != self._key:
            before, now_with = journal.settings_of(settings), self._made_with
            changes = describe_changes(before, now_with) if before and now_with else ""
            return f"was made with other settings{': ' if changes else ''}{changes}"
        if content != now[0]:
            return "was made from another input"
        return "has changed since it was made"

    def _content(self, source: Path) -> str:
        try:
            return file_sha256(source)
        except OSError as error:
            text = f"{source}: cannot be read: {error.strerror}"
            raise self.report.input_error(text) from error
