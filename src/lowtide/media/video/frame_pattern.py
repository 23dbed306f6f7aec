"""Names of the image files that are the frames of a sequence: ``frames/shot_%05d.png``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from lowtide.core.errors import VideoError
from lowtide.core.input_file import require_input

# Files that a sequence may be of; other images lose what a movie of them would show.
FRAME_SUFFIXES = (".png", ".tif", ".tiff")
_SPECIFIER = re.compile(r"%(?:0(\d+))?d")
_NUMBERED = re.compile(r"(.*?)(\d+)(\.[^.]+)")


class FrameFile(NamedTuple):
    """Number of a frame's file, and what tells it from a later one of that name."""

    number: int
    size: int
    changed_ns: int


@dataclass(frozen=True)
class FramePattern:
    """Names of the frames in a folder: a number of at least ``digits``, between two texts."""

    folder: Path
    before: str
    digits: int
    after: str

    @classmethod
    def parse(cls, path: Path) -> FramePattern | None:
        """Return the pattern that a path states by ``%d`` or ``%05d``; None if it is no such."""
        found = list(_SPECIFIER.finditer(path.name))
        if len(found) != 1 or path.suffix.lower() not in FRAME_SUFFIXES:
            return None
        (one,) = found
        before, after = path.name[: one.start()], path.name[one.end() :]
        return cls(path.parent, before, int(one[1] or 1), after)

    @classmethod
    def in_folder(cls, folder: Path) -> FramePattern | None:
        """Return the pattern of the numbered PNG or TIFF files in a folder; None without any.

        Raises:
            VideoError: They are of several patterns.
        """
        texts: dict[tuple[str, str], list[str]] = {}
        for path in folder.iterdir():
            found = _NUMBERED.fullmatch(path.name)
            if found is None or path.name.startswith(".") or not path.is_file():
                continue
            if path.suffix.lower() in FRAME_SUFFIXES:
                texts.setdefault((found[1], found[3]), []).append(found[2])
        made = [
            cls(folder, before, min(map(len, numbers)), after)
            for (before, after), numbers in sorted(texts.items())
        ]
        if len(made) > 1:
            names = [str(one.path) for one in made]
            raise VideoError(
                f"{folder}: {len(made)} sequences of images: {', '.join(names[:3])}",
                hint=f"name one of them: lowtide video '{names[0]}'",
            )
        if not made:
            return None
        (((before, after), numbers),) = texts.items()
        for number in numbers:
            if made[0].name(int(number)) != before + number + after:
                raise VideoError(
                    f"{folder / (before + number + after)}: numbers of {made[0].digits} and of"
                    f" {len(number)} digits are in this folder",
                    hint="number all frames with as many digits",
                )
        return made[0]

    @property
    def path(self) -> Path:
        """The pattern as a path, with ``%05d`` for the number."""
        number = f"%0{self.digits}d" if self.digits > 1 else "%d"
        return self.folder / f"{self.before}{number}{self.after}"

    def name(self, number: int) -> str:
        """Return the name of a frame's file."""
        return f"{self.before}{number:0{self.digits}}{self.after}"

    def file(self, number: int) -> Path:
        """Return the file of a frame."""
        return self.folder / self.name(number)

    def files(self) -> list[FrameFile]:
        """Return the files that there are, by their numbers.

        Raises:
            VideoError: There are none, or the folder cannot be read.
        """
        found = []
        try:
            for path in self.folder.iterdir():
                text = path.name.removeprefix(self.before).removesuffix(self.after)
                if text.isascii() and text.isdigit() and self.name(int(text)) == path.name:
                    status = require_input(path, VideoError)
                    found.append(FrameFile(int(text), status.st_size, status.st_mtime_ns))
        except OSError as error:
            raise VideoError(f"{self.folder}: cannot be read: {error.strerror}") from error
        if not found:
            raise VideoError(
                f"{self.path}: no such files", hint=f"the first one may be {self.name(1)}"
            )
        return sorted(found)
