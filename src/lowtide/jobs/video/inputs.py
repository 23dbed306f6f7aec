"""Files of a video job: videos, and folders of numbered images that are one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from lowtide.core.atomic_file import require_name
from lowtide.core.errors import UsageError, VideoError
from lowtide.core.input_file import exists, is_folder, require_input
from lowtide.media.discover import FilePair, Found, MediaKind
from lowtide.media.video.frame_pattern import FRAME_SUFFIXES, FramePattern
from lowtide.media.video.video_containers import CONTAINERS

VIDEOS = MediaKind(
    "video",
    ".mp4 .m4v .mov .mkv .webm .avi .ts .mts .m2ts .mpg .mpeg .vob .dv .wmv .flv .3gp .ogv".split(),
    lambda suffix: CONTAINERS.get("." + suffix.lower().lstrip(".")),
    VideoError,
)
_NEW_NAMES = "%06d"  # of a video's frames


def find_sequence(
    inputs: Sequence[str | Path], output: str | Path, format: str | None, text: str
) -> Found | None:
    """Pair a sequence of images with its output, or a video with a sequence.

    A sequence is a folder of numbered images without videos, or a pattern such as
    ``frames/%05d.png``, which is also its path in the pair.

    Args:
        inputs: What was asked for; of a sequence no more than that one.
        output: A pattern; a folder, for images of the input's names, or with ``format`` png, tif or
            tiff; or a video file.
        format: Suffix of outputs in a folder.
        text: What results that are named after inputs have in their name.

    Returns:
        The pair; None if neither side is a sequence.

    Raises:
        UsageError: The output is none that fits, or is the input.
        VideoError: A folder holds several sequences.
    """
    require_name(output)
    suffix = None if format is None else "." + format.lower().lstrip(".")
    sources = [_sequence(Path(one)) for one in inputs]
    written = Path(output).suffix.lower() in FRAME_SUFFIXES
    if not any(sources) and suffix not in FRAME_SUFFIXES and not written:
        return None
    if len(inputs) != 1 or (sources[0] is None and is_folder(Path(inputs[0]))):
        raise UsageError(
            "a sequence of images is the only input, or made of one video",
            hint="run them one after another",
        )
    if text:
        raise UsageError(f"--suffix {text} is not for sequences of images", hint="drop it")
    (source,), (given,) = sources, inputs
    if source is None:
        require_input(Path(given), VideoError)
    target = _target(source, output, suffix)
    path = Path(given) if source is None else source.path
    _refuse_input(source, target)
    return Found([FilePair(path, target, path.as_posix())], [], single_file=True)


def _sequence(path: Path) -> FramePattern | None:
    """Return the pattern of a sequence; None for anything else."""
    if not is_folder(path):
        return None if exists(path) else FramePattern.parse(path)
    found = FramePattern.in_folder(path)
    if found is None or any(VIDEOS.is_named(one) for one in path.rglob("*")):
        return None
    return found


def _target(source: FramePattern | None, output: str | Path, suffix: str | None) -> Path:
    target = Path(output)
    if is_folder(target) or os.fspath(output).endswith(("/", os.sep)) or not target.suffix:
        ending = suffix or (None if source is None else source.path.suffix)
        if ending in CONTAINERS:
            assert source is not None  # only of images is this called for a video
            return target / f"{source.folder.resolve().name}{ending}"
        if suffix is not None and suffix not in FRAME_SUFFIXES:
            VIDEOS.check_name(suffix, f"format {suffix[1:]!r}")
        if source is None:
            return target / f"{_NEW_NAMES}{ending}"
        return target / source.path.with_suffix(ending or "").name
    if suffix is not None and suffix != target.suffix.lower():
        raise UsageError(
            f"--format {suffix[1:]} contradicts the name {target}", hint="drop one of them"
        )
    if FramePattern.parse(target) is None:
        if target.suffix.lower() in FRAME_SUFFIXES:
            raise UsageError(
                f"{target} names one image, and there is one for each frame",
                hint=f"-o '{target.with_name(f'{target.stem}_%05d{target.suffix}')}'",
            )
        VIDEOS.check_name(target.suffix, f"{target}: the suffix {target.suffix!r}")
    return target


def _refuse_input(source: FramePattern | None, target: Path) -> None:
    """Raise `UsageError` where the files of the output would be those of the input."""
    made = FramePattern.parse(target)
    if source is None or made is None or source.folder.resolve() != made.folder.resolve():
        return
    if source.path.name.casefold() == made.path.name.casefold():
        raise UsageError(
            f"{target}: this output is the input", hint="choose another output name or folder"
        )
