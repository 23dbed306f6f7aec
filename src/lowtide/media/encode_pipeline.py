"""libvips pipeline that reads rows from a pipe and encodes them as an image file."""

from __future__ import annotations

from pathlib import Path

import pyvips

from lowtide.media.encode import EncodeOptions, encode_image
from lowtide.media.formats import AVIF, WEBP, ImageFormat, output_sample
from lowtide.media.image_info import ImageInfo
from lowtide.media.metadata import Metadata, attach, keep_flags
from lowtide.media.pixels import convert_samples, interpretation_of, resize


class EncodePipeline:
    """libvips pipeline from the pipe to the file: resize, conversion, encoding."""

    def __init__(
        self,
        image_format: ImageFormat,
        info: ImageInfo,
        size: tuple[int, int],
        metadata: Metadata,
        options: EncodeOptions,
        *,
        zero_alpha: bool,
    ) -> None:
        self.notes = _notes(image_format, info, metadata)
        # Whether the whole image is encoded when its last row has come.
        self.encodes_at_end = image_format in (WEBP, AVIF)
        # And in a heap that gives blocks back. An AVIF takes seconds, in which another image is
        # computed: not there.
        self.trims_heap = image_format is WEBP
        self._format, self._info, self._size = image_format, info, size
        self._metadata, self._options, self._zero_alpha = metadata, options, zero_alpha

    def run(self, descriptor: int, path: Path) -> None:
        """Encode the PNG stream of a pipe descriptor to ``path``; raises `pyvips.Error`."""
        source = pyvips.Source.new_from_descriptor(descriptor)
        # unlimited, since the limits against hostile files would reject very wide rows, and this
        # stream is Lowtide's own.
        image = pyvips.Image.pngload_source(
            source, access="sequential", fail_on="error", unlimited=True
        )
        info = self._info
        if info.sample_type == "float32":
            image = image.bandfold(factor=4 * info.channels)
            image = image.copy(format="float", bands=info.channels)
        image = image.copy(interpretation=interpretation_of(info.channels, info.sample_type))
        if self._size != (info.width, info.height):
            image = resize(image, *self._size)
        if self._zero_alpha:
            image = image.extract_band(0, n=info.color_channels).bandjoin_const([0])
        stored, _note = output_sample(self._format, info.sample_type)
        image = attach(convert_samples(image, stored, bits=self._format.bits), self._metadata)
        keep, unit = keep_flags(self._metadata), self._metadata.unit
        encode_image(
            image,
            path,
            self._format,
            self._options,
            keep=keep,
            unit=unit,
            keep_hidden_color=self._zero_alpha,
        )


def _notes(image_format: ImageFormat, info: ImageInfo, metadata: Metadata) -> tuple[str, ...]:
    notes: list[str] = []
    _stored, rounding = output_sample(image_format, info.sample_type)
    if rounding:
        notes.append(rounding)
    if metadata.icc is not None and metadata.profile_for(info.color_channels) is None:
        notes.append("the ICC profile is for another number of color channels and is not written")
    if metadata.exif is not None and "exif" not in image_format.metadata_kinds:
        notes.append(f"{image_format.name} files are written without EXIF")
    if metadata.iptc is not None and "iptc" not in image_format.metadata_kinds:
        notes.append(f"{image_format.name} files are written without IPTC")
    return tuple(notes)
