"""Result of a denoised camera RAW file: its mosaic, or what LibRaw develops of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lowtide.media.encode import EncodeOptions
from lowtide.media.image_info import ImageInfo
from lowtide.media.image_sink import open_sink
from lowtide.media.metadata import Metadata
from lowtide.media.raw_exif import exif_of
from lowtide.media.raw_facts import RawResult
from lowtide.media.raw_planes import RawSource

_ROWS = 64


class RawSink:
    """`lowtide.media.image_rows.ImageFile` of a RAW file's planes.

    Rows are put back in their place in the values of ``source``, which are in memory once: a row
    may be written when it was read. The file is developed and encoded by `finish`.

    Args:
        target: The output file.
        result: What is written.
        part: Temporary file in the folder of ``target``, by default of a random name.

    Raises:
        OutputError: The folder cannot be made or written.
    """

    def __init__(
        self,
        target: Path,
        source: RawSource,
        result: RawResult,
        *,
        strip_metadata: bool,
        options: EncodeOptions,
        part: Path | None,
    ) -> None:
        self.info: ImageInfo = source.info
        self._layout, self._output = source.layout, result.output
        self._file = open_sink(
            target,
            result.info,
            metadata=Metadata(exif=exif_of(source.raw.other)),
            strip_metadata=strip_metadata,
            options=options,
            default_format=result.format,
            part=part,
        )
        self.notes: Sequence[str] = self._file.notes
        self._raw, self._open = source.raw.share(), True
        self._finished = False

    def write(self, first: int, values: np.ndarray) -> None:
        """Put rows (N, W', C) of the planes in their place."""
        self._layout.scatter(values, first, self._raw.values)

    def close_rows(self) -> None:
        """Signal that all rows were written; does nothing here, as `commit` finishes."""

    def finish(self) -> None:
        """Develop and encode the file; does nothing if already done.

        Raises:
            ImageError: It cannot be developed.
            OutputError: It cannot be written; no files are left behind.
        """
        if self._finished:
            return
        values = self._raw.values
        if self._output != "mosaic":
            bits = 8 * self._file.info.sample_bytes
            values = self._raw.develop(bits=bits, linear=self._output == "linear")
        rows = values.reshape(*values.shape[:2], -1)
        for first in range(0, len(rows), _ROWS):
            self._file.write(first, np.ascontiguousarray(rows[first : first + _ROWS]))
        del values, rows
        self._release()
        self._file.finish()
        self._finished = True

    def commit(self) -> Path:
        """Finish the file, rename it to its target, and return the target."""
        self.finish()
        return self._file.commit()

    def abort(self) -> None:
        """Remove the part file and new folders; does nothing after `commit`."""
        self._file.abort()
        self._release()

    def _release(self) -> None:
        if self._open:
            self._raw.close()
            self._open = False
