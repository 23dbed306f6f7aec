"""Host memory of encoding an image, before it is encoded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lowtide.media import codec_memory
from lowtide.media.encode import EncodeOptions
from lowtide.media.formats import output_format
from lowtide.media.image_info import ImageInfo


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
