"""Tags of a file and its streams, as they are copied from one container to another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from av.container import InputContainer

# What a muxer writes about the file that it writes.
_MUXER_KEYS = {"major_brand", "minor_version", "compatible_brands", "encoder", "duration"}
# Sizes and rates that mkvmerge measured on the file that it wrote.
_STATISTICS = ("bps", "number_of_frames", "number_of_bytes", "duration", "_statistics")


def file_metadata(opened: InputContainer) -> dict[str, str]:
    """Tags of a file but those of its muxer."""
    return {key: text for key, text in opened.metadata.items() if key.lower() not in _MUXER_KEYS}


def title_of(metadata: Mapping[str, str]) -> str:
    """Title of a stream; MP4 calls it its name."""
    return metadata.get("title") or metadata.get("name") or ""


def copied_metadata(metadata: Mapping[str, str], container: str) -> dict[str, str]:
    """Tags of a stream whose packets are copied."""
    left_out = {"handler_name", "vendor_id"} if container in ("matroska", "webm") else set()
    kept = {
        key: text
        for key, text in metadata.items()
        if key not in left_out | {"name"} and not key.lower().startswith(_STATISTICS)
    }
    title = title_of(metadata)
    return kept | ({"title": title} if title else {})


def picture_metadata(metadata: Mapping[str, str], container: str, timecode: bool) -> dict[str, str]:
    """Tags of the source's picture that are true of the new one.

    ``timecode`` is whether a timecode is, by which MP4 counts frames of one rate.
    """
    untrue = {"encoder"} if timecode else {"encoder", "timecode"}
    kept = copied_metadata(metadata, container)
    return {key: text for key, text in kept.items() if key.lower() not in untrue}
