"""Which files a command line means, and where each result goes."""

from __future__ import annotations

import glob
from dataclasses import dataclass
from pathlib import Path

from lowtide.core.errors import ImageError, UsageError
from lowtide.media.formats import SUFFIXES, format_of_suffix

_GLOB_CHARACTERS = set("*?[")


@dataclass(frozen=True)
class Job:
    """One image to read and one to write; ``name`` is the input as reports call it."""

    source: Path
    target: Path
    name: str


def discover(
    inputs: list[str | Path] | list[str] | list[Path],
    output: Path | str,
    *,
    format: str | None = None,
    suffix_text: str = "",
) -> list[Job]:
    """Pair every input image with its output file.

    ``inputs`` are files, folders (searched with their subfolders, whose tree is repeated under
    ``output``) and glob patterns. A single file with an ``output`` that has an image suffix is
    written to exactly that file, or into it if it is a folder; otherwise ``output`` is a folder.
    ``format`` (``png``, ``jpg`` ...) replaces the suffix of the outputs, ``suffix_text`` is added
    to their names. Hidden files and folders are skipped in folders, and so is ``output``.

    Raises `UsageError` for an output suffix that is not supported, an output that is an input,
    and two inputs with one output; `ImageError` for an input that does not exist or holds no
    image.
    """
    target = Path(output)
    suffix = _output_suffix(format)
    found = _expand(inputs, target)
    single = len(found) == 1 and len(inputs) == 1 and not Path(inputs[0]).is_dir()
    if single and target.suffix and not target.is_dir():
        if format_of_suffix(target.suffix) is None:
            raise _unsupported(f"{target}: {target.suffix!r}")
        jobs = [Job(found[0][0], target, found[0][1].as_posix())]
    else:
        jobs = [
            Job(source, _place(target, relative, suffix, suffix_text), relative.as_posix())
            for source, relative in found
        ]
    _check(jobs)
    return jobs


def _unsupported(what: str) -> UsageError:
    return UsageError(
        f"{what} is not an image format Lowtide writes", hint=f"use one of {', '.join(SUFFIXES)}"
    )


def _output_suffix(name: str | None) -> str | None:
    if name is None:
        return None
    if format_of_suffix(name) is None:
        raise _unsupported(f"format {name!r}")
    return "." + name.lower().lstrip(".")


def _expand(
    inputs: list[str | Path] | list[str] | list[Path], output: Path
) -> list[tuple[Path, Path]]:
    """Every input image and its path relative to the output folder, without repetitions."""
    found: dict[Path, tuple[Path, Path]] = {}
    for item in inputs:
        for source, relative in _expand_one(str(item), output):
            found.setdefault(source.resolve(), (source, relative))
    if not found:
        raise UsageError("no input given", hint="name an image, a folder or a pattern")
    return list(found.values())


def _expand_one(item: str, output: Path) -> list[tuple[Path, Path]]:
    path = Path(item)
    if path.is_dir():
        return _in_folder(path, output)
    # A file whose name happens to contain a bracket is that file, not a pattern.
    if path.exists() or not _GLOB_CHARACTERS & set(item):
        if not path.exists():
            raise ImageError(f"{path}: no such file or folder")
        return [(path, Path(path.name))]
    # `Path.glob` takes no absolute patterns.
    names = sorted(glob.glob(item, recursive=True))  # noqa: PTH207
    matches = [Path(name) for name in names]
    images = [match for match in matches if match.is_file() and _is_image(match)]
    if not images:
        raise ImageError(
            f"{item}: the pattern matches no image ({len(matches)} other files)",
            hint=f"supported suffixes are {', '.join(SUFFIXES)}",
        )
    return [(image, Path(image.name)) for image in images]


def _in_folder(folder: Path, output: Path) -> list[tuple[Path, Path]]:
    root, results = folder.resolve(), output.resolve()
    # An output folder inside the input holds results of an earlier run. When it is the input
    # folder itself, or one above, there is nothing to tell them by.
    return images_below(folder, results if root in results.parents else None)


def images_below(folder: Path, skipped: Path | None = None) -> list[tuple[Path, Path]]:
    """Every image in a folder and its subfolders, with its path relative to it, in an order that no
    file system changes.

    What is hidden is left out, and all below ``skipped``, which is resolved. Raises `ImageError`
    where there is no image.
    """
    root = folder.resolve()
    images: list[tuple[Path, Path]] = []
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        if any(part.startswith(".") for part in relative.parts):
            continue
        if skipped is not None and (root / relative).is_relative_to(skipped):
            continue
        if path.is_file() and _is_image(path):
            images.append((path, relative))
    if not images:
        raise ImageError(
            f"{folder}: no images in this folder",
            hint=f"supported suffixes are {', '.join(SUFFIXES)}",
        )
    return images


def _is_image(path: Path) -> bool:
    # Unfinished outputs are hidden and end in .lowtide.part, so that they never get here.
    return not path.name.startswith(".") and format_of_suffix(path.suffix or ".") is not None


def _place(folder: Path, relative: Path, suffix: str | None, text: str) -> Path:
    ending = suffix or relative.suffix
    if format_of_suffix(ending or ".") is None:
        raise _unsupported(f"{relative}: {relative.suffix or 'a name without a suffix'!r}")
    return folder / relative.with_name(f"{relative.stem}{text}{ending}")


def _check(jobs: list[Job]) -> None:
    # Compared without case, because on some file systems these names are one file.
    sources = {_key(job.source): job.source for job in jobs}
    targets: dict[str, Path] = {}
    for job in jobs:
        key = _key(job.target)
        if key in sources:
            raise UsageError(
                f"{job.target}: this output is the input {sources[key]}",
                hint="choose another output name or folder",
            )
        if key in targets:
            raise UsageError(
                f"{targets[key]} and {job.source} would both be written to {job.target}",
                hint="rename one, or give them different output folders",
            )
        targets[key] = job.source


def _key(path: Path) -> str:
    return str(path.resolve()).casefold()
