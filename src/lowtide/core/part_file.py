"""Files that appear whole or not at all: written beside their place, then renamed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# Names of what a killed run left unfinished: hidden, so that no folder's images count them.
PART_PATTERN = ".*.lowtide.part"


def part_of(path: Path) -> Path:
    """The hidden name beside ``path`` under which it is written until it is complete."""
    return path.with_name(f".{path.name}.lowtide.part")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """`part_of` ``path``, which is renamed to ``path`` when the block ends.

    If the block raises, or is killed, what was at ``path`` stays; what the block wrote is removed
    where it raised. Errors pass, those of renaming too.
    """
    part = part_of(path)
    try:
        yield part
        part.replace(path)
    except BaseException:
        with suppress(OSError):  # the error that led here says more
            part.unlink(missing_ok=True)
        raise
