"""Input files and output paths of a command line: files, folders and globs."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lowtide.core.atomic_file import PART_PATTERN, file_key, require_name
from lowtide.core.errors import ImageError, InputError, UsageError
from lowtide.core.input_file import exists, is_file, is_folder, require_input
from lowtide.media.detect import RAW_SUFFIXES, SkippedFile, skip_reason, skipped_summary
from lowtide.media.formats import SUFFIXES, WRITTEN_SUFFIXES, format_of_suffix

_GLOB_CHARACTERS = set("*?[")
_SEPARATORS = tuple(sep for sep in (os.sep, os.altsep) if sep)


@dataclass(frozen=True)
class MediaKind:
    """Kind of files that a job reads and writes, by their suffixes.

    Attributes:
        noun: What one is called in messages.
        suffixes: Supported suffixes of inputs, with their dot, in lower case; of two that a name
            ends with the longer one counts.
        format_of: Returns the format that a suffix of an output names, or None.
        error: Raised where there is none of the kind.
        out_suffixes: Suffixes of outputs where they are others than those of inputs; the first one
            is that of results which are named after inputs.
        fallback: Suffix of such results for inputs whose own format is not written.
    """

    noun: str
    suffixes: Sequence[str]
    format_of: Callable[[str], object | None]
    error: type[InputError] = InputError
    out_suffixes: Sequence[str] = ()
    fallback: str = ""

    def is_named(self, path: Path) -> bool:
        """Return whether the suffix of ``path`` is one of inputs of this kind."""
        return self.suffix_of(path).lower() in self.suffixes

    def suffix_of(self, path: Path) -> str:
        """Return the suffix of a name, which may have several dots: ``.nii.gz``."""
        name, known = path.name.lower(), (*self.suffixes, *self.out_suffixes)
        fitting = [one for one in known if name.endswith(one) and len(one) < len(name)]
        return path.name[-len(max(fitting, key=len)) :] if fitting else path.suffix

    def result_name(self, source: Path, suffix: str | None, text: str) -> str:
        """Return the name of the result of ``source``, with ``text`` before its suffix.

        Raises `UsageError` where that would be no suffix of an output.
        """
        own = self.suffix_of(source)
        ending = suffix or (self.out_suffixes[0] if self.out_suffixes else own)
        if self.fallback and own.lower() in self.suffixes and not self.format_of(ending or "."):
            ending = self.fallback
        self.check_name(ending, f"{source}: {own or 'a name without a suffix'!r}")
        return source.name.removesuffix(own) + text + ending

    def check_name(self, name: str, shown: str) -> None:
        """Raise `UsageError` if ``name``, a suffix, is not one of outputs of this kind."""
        if self.format_of(name or ".") is None:
            noun = "image" if self.out_suffixes else self.noun
            named = self.out_suffixes or self.suffixes
            raise UsageError(
                f"{shown} names no {noun} format that Lowtide writes",
                hint=f"use one of {', '.join(filter(self.format_of, named))}",
            )

    def missing(self, what: str, others: list[SkippedFile]) -> InputError:
        """Return the error for a place with none of the kind, but ``others``."""
        hint = f"supported suffixes are {', '.join(self.suffixes)}"
        return self.error("; ".join([what, *skipped_summary(others)]), hint=hint)


IMAGES = MediaKind("image", SUFFIXES, format_of_suffix, ImageError, fallback=".png")
RAW_FILES = MediaKind(
    "camera RAW file", RAW_SUFFIXES, format_of_suffix, ImageError, (".tif", *WRITTEN_SUFFIXES)
)


@dataclass(frozen=True)
class FilePair:
    """Input and output file of one item; ``name`` is the input's name in reports."""

    source: Path
    target: Path
    name: str


@dataclass(frozen=True)
class DiscoveredFiles:
    """Result of `discover_files`: file pairs, and the files left out with reasons.

    ``single_file`` is whether ``output`` named the single target itself, not its folder.
    """

    pairs: list[FilePair]
    skipped: list[SkippedFile]
    single_file: bool


def discover_files(
    inputs: list[str | Path] | list[str] | list[Path],
    output: Path | str,
    *,
    kind: MediaKind = IMAGES,
    format: str | None = None,
    suffix_text: str = "",
) -> DiscoveredFiles:
    """Pair every input file of a kind with its output file.

    ``inputs`` are files, folders (searched with their subfolders, whose tree is repeated under
    ``output``) and glob patterns. For a single file ``output`` is a file, in the format that its
    suffix names or, without one, the input's; it is a folder if there is one of that name or a
    separator ends it. Otherwise ``output`` is a folder. ``format`` (``png``, ``jpg`` ...) replaces
    the suffix of the outputs, ``suffix_text`` is added to their names. In folders, hidden files and
    folders are skipped, and so are ``output`` and results of an earlier run next to their inputs.

    Raises `UsageError` for an output suffix that is not supported, an output that is an input,
    two inputs with one output, a file's name for several inputs, and a ``suffix_text`` or
    ``format`` that contradicts ``output``; the kind's error for an input that does not exist or
    holds none.
    """
    require_name(output)
    target, suffix = Path(output), _output_suffix(format, kind)
    skipped: list[SkippedFile] = []
    found = _expand(inputs, target, skipped, kind)
    folder = is_folder(target) or os.fspath(output).endswith(_SEPARATORS)
    if not folder and len(found) == 1 and len(inputs) == 1 and not is_folder(Path(inputs[0])):
        _check_name(target, suffix, suffix_text, kind)
        jobs = [FilePair(found[0][0], target, found[0][1].as_posix())]
        _check_conflicts(jobs)
        return DiscoveredFiles(jobs, skipped, single_file=True)
    if not folder and kind.format_of(kind.suffix_of(target) or ".") is not None:
        raise UsageError(
            f"{target} names one file, and there may be several results",
            hint=f"name a folder: -o {target.with_suffix('')}",
        )
    jobs = [
        FilePair(source, _place(target, relative, suffix, suffix_text, kind), relative.as_posix())
        for source, relative in found
    ]
    if suffix_text:
        jobs = _without_results(jobs, skipped)
    _check_conflicts(jobs)
    return DiscoveredFiles(jobs, skipped, single_file=False)


def count_by_kind(
    inputs: list[str | Path] | list[str] | list[Path],
    output: Path | str,
    kinds: Sequence[MediaKind],
) -> list[int]:
    """Count the inputs of each kind by their names, as `discover_files` would find them."""
    suffixes = [suffix for kind in kinds for suffix in kind.suffixes]
    nouns = " or ".join(kind.noun for kind in kinds)
    every = MediaKind(nouns, suffixes, lambda suffix: None, kinds[0].error)
    found = [source for source, _ in _expand(inputs, Path(output), [], every)]
    return [sum(map(kind.is_named, found)) for kind in kinds]


def _check_name(target: Path, suffix: str | None, text: str, kind: MediaKind) -> None:
    """Raise `UsageError` if the name of a single file contradicts the options."""
    own = kind.suffix_of(target)
    if own:
        kind.check_name(own, f"{target}: the suffix {own!r}")
    other = suffix is not None and kind.format_of(suffix) != kind.format_of(own or ".")
    if own and suffix is not None and other:
        raise UsageError(
            f"--format {suffix[1:]} contradicts the name {target}", hint="drop one of them"
        )
    if text:
        raise UsageError(
            f"--suffix {text} is for results that are named after their inputs, and {target} is a"
            " file's own name",
            hint=f"drop it, or name a folder: -o {target.with_suffix('')}{os.sep}",
        )


def _without_results(jobs: list[FilePair], skipped: list[SkippedFile]) -> list[FilePair]:
    """Drop the pairs whose input is the output of another pair."""
    results = {
        file_key(job.target): job for job in jobs if file_key(job.target) != file_key(job.source)
    }
    kept = []
    for job in jobs:
        if (of := results.get(file_key(job.source))) is None:
            kept.append(job)
        else:
            skipped.append(SkippedFile(job.source, f"by its name an output of {of.source.name}"))
    return kept


def _output_suffix(name: str | None, kind: MediaKind) -> str | None:
    if name is None:
        return None
    kind.check_name(name, f"format {name!r}")
    return "." + name.lower().lstrip(".")


def _expand(
    inputs: list[str | Path] | list[str] | list[Path],
    output: Path,
    skipped: list[SkippedFile],
    kind: MediaKind,
) -> list[tuple[Path, Path]]:
    """Return each input file once, with its path relative to the output folder."""
    found: dict[Path, tuple[Path, Path]] = {}
    for item in inputs:
        for source, relative in _expand_one(str(item), output, skipped, kind):
            found.setdefault(source.resolve(), (source, relative))
    if not found:
        raise UsageError("no input given", hint="name files, folders or patterns")
    return list(found.values())


def _expand_one(
    item: str, output: Path, skipped: list[SkippedFile], kind: MediaKind
) -> list[tuple[Path, Path]]:
    path = Path(item)
    if not item:
        raise UsageError("an input has no name", hint="name a file, a folder or a pattern")
    if is_folder(path):
        return _in_folder(path, output, skipped, kind)
    # An existing file whose name contains a bracket is not a pattern.
    if exists(path) or not _GLOB_CHARACTERS & set(item):
        require_input(path, kind.error)
        return [(path, Path(path.name))]
    # `Path.glob` takes no absolute patterns.
    names = sorted(glob.glob(item, recursive=True))  # noqa: PTH207
    files, others = _split(map(Path, names), kind)
    if not files:
        raise kind.missing(f"{item}: the pattern matches no {kind.noun}", others)
    skipped += others
    return [(file, Path(file.name)) for file in files]


def _in_folder(
    folder: Path, output: Path, skipped: list[SkippedFile], kind: MediaKind
) -> list[tuple[Path, Path]]:
    root, results = folder.resolve(), output.resolve()
    # An output folder inside the input has results of an earlier run. If it is the input folder
    # itself, or one above, results can be recognized only by their names.
    return list_files(folder, kind, results if root in results.parents else None, skipped)


def list_files(
    folder: Path,
    kind: MediaKind = IMAGES,
    excluded: Path | None = None,
    skipped_files: list[SkippedFile] | None = None,
) -> list[tuple[Path, Path]]:
    """Find files of a kind in a folder and its subfolders, with relative paths.

    The order does not depend on the file system. Hidden files and all below ``excluded``, a
    resolved path, are left out. What is left out is appended to ``skipped_files``, a folder as one
    entry. Raises the kind's error if there is none.
    """
    others: list[SkippedFile] = []
    files, more = _split(_files_below(folder, excluded, others), kind)
    others += more
    if not files:
        raise kind.missing(f"{folder}: no {kind.noun}s in this folder", others)
    if skipped_files is not None:
        skipped_files += others
    return [(file, file.relative_to(folder)) for file in files]


def _files_below(
    folder: Path, excluded: Path | None, skipped_files: list[SkippedFile]
) -> Iterator[Path]:
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        skipped_files.append(SkippedFile(folder, f"cannot be read: {error.strerror}"))
        return
    for path in entries:
        if path.name.startswith("."):
            # Lowtide's own journals and part files are not reported.
            if not path.name.startswith(".lowtide-") and not path.match(PART_PATTERN):
                skipped_files.append(SkippedFile(path, "hidden"))
        elif not is_folder(path):
            yield path
        elif path.is_symlink():
            skipped_files.append(SkippedFile(path, "a link to a folder"))
        elif excluded is not None and path.resolve() == excluded:
            skipped_files.append(SkippedFile(path, "the output folder"))
        else:
            yield from _files_below(path, excluded, skipped_files)


def _split(paths: Iterable[Path], kind: MediaKind) -> tuple[list[Path], list[SkippedFile]]:
    """Split paths into files of a kind, by their suffixes, and others."""
    files, others = [], []
    for path in paths:
        if is_file(path) and kind.is_named(path):
            files.append(path)
        else:
            others.append(SkippedFile(path, skip_reason(path)))
    return files, others


def _place(folder: Path, relative: Path, suffix: str | None, text: str, kind: MediaKind) -> Path:
    return folder / relative.with_name(kind.result_name(relative, suffix, text))


def _check_conflicts(jobs: list[FilePair]) -> None:
    sources = {file_key(job.source): job.source for job in jobs}
    targets: dict[str, Path] = {}
    for job in jobs:
        key = file_key(job.target)
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
