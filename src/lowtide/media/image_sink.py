"""Streaming image writer that encodes rows as they arrive.

The file is renamed to its target when it is complete. Rows go as an uncompressed PNG through a pipe
to a thread in which libvips decodes and encodes them. Neither side holds more than a window of rows
unless the output format needs the whole frame; `output_cost` says before how much that is.
"""

from __future__ import annotations

import contextlib
import os
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyvips

from lowtide.core.atomic_file import (
    new_part_name,
    prepare_part_file,
    probe_disk_error,
    put_in_place,
    sync_to_disk,
    write_error,
)
from lowtide.core.errors import OutputError
from lowtide.core.heap import trimming_heap
from lowtide.media import codec_memory
from lowtide.media._libvips import (
    WRITE_TRIM_BYTES,
    HeapTrimmer,
    configure_libvips,
    libvips_error_text,
)
from lowtide.media.encode import EncodeOptions
from lowtide.media.encode_pipeline import (
    UncompressedPngWriter,
    VipsEncoder,
    require_room_for_encoder,
    wait_until_read,
)
from lowtide.media.formats import output_format, require_format_holds
from lowtide.media.image_info import ImageInfo
from lowtide.media.metadata import ImageMetadata
from lowtide.media.pixels import dtype_of


def open_sink(
    path: Path | str,
    info: ImageInfo,
    *,
    metadata: ImageMetadata | None = None,
    strip_metadata: bool = False,
    options: EncodeOptions | None = None,
    resize_to: tuple[int, int] | None = None,
    zero_alpha: bool = False,
    default_format: str | None = None,
    part: Path | None = None,
    replace: bool = True,
) -> ImageSink:
    """Open an image file for writing by rows.

    Samples that the format cannot hold are rounded; `ImageSink.notes` says so.

    Args:
        path: The output file, whose suffix names the format.
        info: Shape and sample type of the rows.
        metadata: Metadata to write.
        strip_metadata: Write only the ICC profile, since the colors depend on it.
        options: Encoder settings.
        resize_to: (width, height) that the image is resampled to on the way.
        zero_alpha: Write alpha 0 everywhere instead of the rows' alpha.
        default_format: Format of a ``path`` without suffix.
        part: Temporary file in the folder of ``path``, by default of a random name.
        replace: Whether a file that is at ``path`` in the end is replaced.

    Raises:
        UsageError: For a suffix of no supported format.
        OutputError: If the format cannot hold the image, or the folder cannot be made or written.
    """
    target = Path(path)
    width, height = resize_to or (info.width, info.height)
    if width < 1 or height < 1:
        raise OutputError(f"{target}: cannot write an image of {width} x {height} pixels")
    image_format = require_format_holds(
        target, ImageInfo(width, height, info.channels, info.sample_type), default_format
    )
    kept_metadata = metadata or ImageMetadata()
    kept_metadata = kept_metadata.stripped() if strip_metadata else kept_metadata
    encoder = VipsEncoder(
        image_format,
        info,
        (width, height),
        kept_metadata,
        options or EncodeOptions(),
        zero_alpha=zero_alpha,
    )
    return ImageSink(target, info, encoder, part or new_part_name(target), replace)


class ImageSink:
    """Image file as a `lowtide.core.signal.RowSink`; made by `open_sink`.

    Until `commit` the target is untouched: bytes go to the new, hidden file ``part`` next to it.
    ``notes`` are messages about what the format cannot keep. As a context manager it aborts if the
    block is left without a commit.
    """

    def __init__(
        self, path: Path, info: ImageInfo, encoder: VipsEncoder, part: Path, replace: bool
    ) -> None:
        configure_libvips()
        require_room_for_encoder(str(path))
        self.info = info
        self.notes: tuple[str, ...] = encoder.notes
        self._path = path
        self._part, self._replace = part, replace
        self._new_folders = prepare_part_file(path, self._part)
        self._rows = 0
        # The last row is kept until `finish`: with it a whole image is encoded, when what source
        # and network had is free. A WebP takes half of the memory in a heap that gives blocks back.
        self._encodes_at_end, self._trims_heap = encoder.encodes_at_end, encoder.trims_heap
        self._last_row: np.ndarray | None = None
        self._finished = self._committed = False
        self._failure: BaseException | None = None
        self._trimmer = HeapTrimmer(WRITE_TRIM_BYTES)
        self._thread: threading.Thread | None = None
        try:
            self._start_encoder(encoder)
        except BaseException:  # a stop, too
            self._join()
            self._remove()
            raise

    def _start_encoder(self, encoder: VipsEncoder) -> None:
        """Wait until the encoder has read the header, then until its threads wait for rows."""
        out, self._pipe = os.pipe()
        thread = threading.Thread(
            target=self._encode, args=(encoder.run, out), name="lowtide-encoder", daemon=True
        )
        thread.start()
        self._thread = thread
        self._png = self._open_png()
        wait_until_read(out, lambda: self._failure is not None)
        self._png.write_nothing()
        wait_until_read(out, lambda: self._failure is not None)

    def _open_png(self) -> UncompressedPngWriter:
        width, bands, bits = self.info.width, self.info.channels, 8
        if self.info.sample_type == "float32":
            # PNG has no float samples: the bytes are sent as a gray image.
            width, bands = width * bands * 4, 1
        elif self.info.sample_type == "uint16":
            bits = 16
        return UncompressedPngWriter(self._send, width, self.info.height, bands, bits)

    def _encode(self, run: Callable[[int, Path], None], descriptor: int) -> None:
        try:
            run(descriptor, self._part)
        except BaseException as error:  # noqa: BLE001  (raised again by the next write)
            # What libvips has of the part file would fill the disk as long as a frame holds it.
            traceback.clear_frames(error.__traceback__)
            self._failure = error
        finally:
            # Drain the pipe, so that `write` never blocks on an encoder that has stopped.
            while os.read(descriptor, 1 << 16):
                pass
            os.close(descriptor)

    def _send(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            if self._failure is not None:
                raise self._fail()
            view = view[os.write(self._pipe, view) :]

    def write(self, first: int, values: np.ndarray) -> None:
        """Append rows, (N, W, C), in the sample type the sink was opened with.

        Raises `OutputError` if the encoder failed; no files are left behind.
        """
        if self._thread is None:
            raise ValueError(f"{self._path}: write after the sink was closed")
        shape, dtype = (self.info.width, self.info.channels), dtype_of(self.info.sample_type)
        if values.shape[1:] != shape or values.dtype != dtype:
            raise ValueError(
                f"rows of {values.shape} {values.dtype} where {shape} {dtype} is expected"
            )
        last = first + len(values)
        if first != self._rows or last > self.info.height:
            raise ValueError(
                f"rows {first} to {last} where {self._rows} to {self.info.height} are to be written"
            )
        if dtype.kind == "f":
            values = np.ascontiguousarray(values).view(np.uint8)
        if len(values) and last == self.info.height and self._encodes_at_end:
            self._last_row = values[-1:].copy()
            values = values[:-1]
        self._png.write_rows(values)
        self._rows = last
        self._trimmer.add(values.nbytes)

    def close_rows(self) -> None:
        """Signal that all rows were written; does nothing here, as `commit` finishes."""

    def finish(self) -> None:
        """Encode the last rows and sync the file to disk; does nothing if already done.

        Raises `OutputError` if rows are missing or the file cannot be finished; no files are left
        behind.
        """
        if self._finished:
            return
        if self._thread is None:
            raise ValueError(f"{self._path}: finish after the sink was closed")
        if self._rows != self.info.height:
            self.abort()
            raise OutputError(
                f"{self._path}: {self._rows:,} of {self.info.height:,} rows were written"
            )
        with trimming_heap() if self._trims_heap else contextlib.nullcontext():
            if self._last_row is not None:
                self._png.write_rows(self._last_row)
            self._png.finish()
            self._join()
        if self._failure is not None:
            raise self._fail()
        try:
            sync_to_disk(self._part)
        except OSError as error:
            self._failure = error
            raise self._fail() from error
        self._finished = True

    def commit(self) -> Path:
        """Finish the file, rename it to its target, and return the target.

        Raises `OutputError` if either fails; no files are left behind.
        """
        if self._committed:
            raise ValueError(f"{self._path}: commit after the sink was closed")
        self.finish()
        try:
            put_in_place(self._part, self._path, replace=self._replace)
            sync_to_disk(self._path.parent)
        except (OSError, OutputError) as error:
            self._failure = error
            raise self._fail() from error
        self._committed = True
        return self._path

    def abort(self) -> None:
        """Remove the part file and new folders; does nothing after `commit`."""
        if self._committed or (self._thread is None and not self._finished):
            return
        self._join()
        self._finished = False
        self._remove()

    def _join(self) -> None:
        if self._thread is not None:
            os.close(self._pipe)
            self._thread.join()
            self._thread = None

    def _remove(self) -> None:
        self._part.unlink(missing_ok=True)
        for folder in reversed(self._new_folders):
            # Another process may have put a file there.
            with contextlib.suppress(OSError):
                folder.rmdir()

    def _fail(self) -> BaseException:
        self._join()
        failure = self._failure
        if isinstance(failure, pyvips.Error):
            failure = probe_disk_error(self._part) or failure
        self._remove()
        if isinstance(failure, OSError):
            return write_error(self._path, failure)
        if isinstance(failure, pyvips.Error):
            return OutputError(f"{self._path}: cannot be written ({libvips_error_text(failure)})")
        return failure or OutputError(f"{self._path}: the encoder stopped")

    def __enter__(self) -> ImageSink:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.abort()


@dataclass(frozen=True)
class EncodingMemory:
    """Host memory of an encoder in bytes: upper bound, typical value, and the reason.

    ``collecting`` is what it has until the last row, where the image is encoded only then, when
    nothing is read any more; None where it is encoded as the rows come.
    """

    resident_bytes: int
    typical_bytes: int
    reason: str
    collecting: codec_memory.CodecBytes | None = None


def output_cost(
    path: Path | str,
    info: ImageInfo,
    options: EncodeOptions | None = None,
    *,
    resized_from: ImageInfo | None = None,
    default_format: str | None = None,
) -> EncodingMemory:
    """Predict the host memory of encoding an image, without the rows given to it.

    Args:
        path: Output file, whose suffix names the format.
        info: The image in the file.
        options: Encoder settings.
        resized_from: The rows that the image is resampled from, if it is.
        default_format: Format of a ``path`` without suffix.

    Raises:
        UsageError: For a suffix of no supported format.
    """
    chosen = options or EncodeOptions()
    entry = output_format(path, default_format)
    cost = codec_memory.encoding_window(info, strips=entry.by_strips)
    settled = codec_memory.CodecBytes(cost.typical, cost.typical)  # once all rows have come
    if resized_from is not None:
        resizing = codec_memory.resize_bytes(resized_from)
        cost, settled = cost + resizing, settled + resizing
    if entry.encoder_bytes is None:
        return EncodingMemory(cost.upper, cost.typical, f"a {entry.name} is encoded by rows")
    encoder = entry.encoder_bytes(info, chosen)
    collecting, encoding = cost + codec_memory.collected_frame(info), settled + encoder
    return EncodingMemory(
        max(collecting.upper, encoding.upper),
        max(collecting.typical, encoding.typical),
        f"{entry.with_article} is encoded as a whole",
        collecting,
    )
