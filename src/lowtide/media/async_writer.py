"""Background thread that writes rows to a file while the next ones are computed."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lowtide.media.image_info import ImageInfo, ImageRowWriter

# Rows are copied in pieces of about this size, so that the thread can start on the first.
_CHUNK_BYTES = 1 << 20


class AsyncSink:
    """Asynchronous `lowtide.core.signal.RowSink` with a bounded queue.

    A thread writes the rows to ``sink``. The queue holds up to ``max_queued_bytes`` of copied rows;
    `write` blocks while it is full. After `close_rows` the file is finished in the background, and
    `commit` waits for that.
    """

    def __init__(self, sink: ImageRowWriter, max_queued_bytes: int) -> None:
        self.info: ImageInfo = sink.info
        self.notes: Sequence[str] = sink.notes
        self._sink, self._max_queued_bytes = sink, max_queued_bytes
        self._rows: deque[tuple[int, np.ndarray]] = deque()
        self._queued_bytes = 0
        self._closed = self._aborted = False
        self._failure: BaseException | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._write_loop, name="lowtide-writer", daemon=True)
        self._thread.start()

    def write(self, first: int, values: np.ndarray) -> None:
        """Queue rows, (N, W, C); raises what writing earlier rows raised."""
        count = max(1, _CHUNK_BYTES // self.info.row_bytes)
        for top in range(0, len(values), count):
            chunk = values[top : top + count]
            with self._changed:
                self._changed.wait_for(
                    lambda size=chunk.nbytes: (
                        self._failure is not None
                        or not self._queued_bytes
                        or self._queued_bytes + size <= self._max_queued_bytes
                    )
                )
                self._raise_failure()
                self._queued_bytes += chunk.nbytes
            chunk = chunk.copy()  # the caller reuses its buffer for the next rows
            with self._changed:
                self._rows.append((first + top, chunk))
                self._changed.notify_all()

    def close_rows(self) -> None:
        """Signal that all rows were written; the file is finished, but not renamed yet."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def commit(self) -> Path:
        """Wait until everything is written, and rename the file; raises `OutputError`."""
        self.close_rows()
        self._thread.join()
        self._raise_failure()
        return self._sink.commit()

    def abort(self) -> None:
        """Stop writing and remove the part file; does nothing after `commit`."""
        with self._changed:
            self._aborted = True
            self._changed.notify_all()
        self._thread.join()
        self._sink.abort()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _write_loop(self) -> None:
        try:
            while (queued := self._next_rows()) is not None:
                first, rows = queued
                del queued
                self._sink.write(first, rows)
                with self._changed:
                    self._queued_bytes -= rows.nbytes
                    self._changed.notify_all()
                del rows
            if not self._aborted:
                self._sink.finish()
        except BaseException as error:  # noqa: BLE001  (raised again by whoever writes or commits)
            with self._changed:
                self._failure = error
                self._rows.clear()
                self._changed.notify_all()

    def _next_rows(self) -> tuple[int, np.ndarray] | None:
        """Wait for the next queued rows; return None if there are no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._rows or self._closed or self._aborted)
            if self._aborted or not self._rows:
                return None
            return self._rows.popleft()

    def __enter__(self) -> AsyncSink:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.abort()
