"""Streaming image file I/O by rows, based on libvips.

`inspect_image` and `output_cost` predict the memory of reading and writing; `open_image` and
`open_sink` read and write. `lowtide.media.discover.discover_files` finds the files; it is not
exported here because the module of that name would hide it. libvips is loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lowtide.media.async_writer import AsyncSink
    from lowtide.media.discover import FilePair
    from lowtide.media.encode import EncodeOptions
    from lowtide.media.formats import (
        FORMATS,
        SUFFIXES,
        ImageFormat,
        add_format,
        output_sample,
        require_format_holds,
    )
    from lowtide.media.image_facts import MAX_PIXELS, ImageFacts, inspect_image
    from lowtide.media.image_sink import EncodingMemory, ImageSink, open_sink, output_cost
    from lowtide.media.image_source import ImageSource, open_image
    from lowtide.media.metadata import ImageMetadata

_HOMES = {
    "FORMATS": "formats",
    "MAX_PIXELS": "image_facts",
    "SUFFIXES": "formats",
    "EncodeOptions": "encode",
    "ImageFormat": "formats",
    "ImageFacts": "image_facts",
    "ImageSink": "image_sink",
    "ImageSource": "image_source",
    "FilePair": "discover",
    "ImageMetadata": "metadata",
    "EncodingMemory": "image_sink",
    "AsyncSink": "async_writer",
    "add_format": "formats",
    "require_format_holds": "formats",
    "inspect_image": "image_facts",
    "open_image": "image_source",
    "open_sink": "image_sink",
    "output_cost": "image_sink",
    "output_sample": "formats",
}

__all__ = [
    "FORMATS",
    "MAX_PIXELS",
    "SUFFIXES",
    "AsyncSink",
    "EncodeOptions",
    "EncodingMemory",
    "FilePair",
    "ImageFacts",
    "ImageFormat",
    "ImageMetadata",
    "ImageSink",
    "ImageSource",
    "add_format",
    "inspect_image",
    "open_image",
    "open_sink",
    "output_cost",
    "output_sample",
    "require_format_holds",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
