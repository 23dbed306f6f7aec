"""Parsing of untrusted metadata in model files, with limits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.core.errors import ModelError
from lowtide.models.descriptor import SizeRule

if TYPE_CHECKING:
    from pydantic import ValidationError

# Configurations have some hundred characters. The largest side that any known model requires is
# 256: a model that requires more could not be run in tiles, and would take gigabytes.
MOST_CHARACTERS, LARGEST_SIDE = 1 << 16, 1024


def metadata_error(path: Path) -> str:
    """Return the start of an error message about damaged metadata."""
    return f"the metadata of {path} is damaged"


def parse_json(path: Path, entry: str, text: str) -> Any:
    """Parse the JSON of an entry.

    Raises `ModelError` for text that is no JSON, too long or nested too deep.
    """
    if len(text) > MOST_CHARACTERS:
        raise ModelError(f"{metadata_error(path)}: {entry} has {len(text)} characters")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{metadata_error(path)}: {entry}: {error}") from error


def first_problem(error: ValidationError) -> str:
    """Return the first thing that is wrong, with the name of its field if there is one."""
    one = error.errors()[0]
    return ": ".join(
        filter(None, (".".join(map(str, one["loc"])), one["msg"].removeprefix("Value error, ")))
    )


def size_rule(where: str, values: Any) -> SizeRule:
    """Build a `SizeRule` from a table of its fields.

    Raises `ModelError`, which begins with ``where``, for one that makes no sense or needs sides
    above `LARGEST_SIDE`.
    """
    known = {"minimum": int, "multiple_of": int, "square": bool}
    if not isinstance(values, Mapping) or not set(values) <= set(known):
        raise ModelError(f"{where}: a size rule has only the fields {', '.join(known)}")
    wrong = [name for name, value in values.items() if type(value) is not known[name]]
    if wrong or max([0, *values.values()]) > LARGEST_SIDE:
        shown = ", ".join(f"{name} {str(value)[:20]}" for name, value in values.items())
        raise ModelError(
            f"{where}: a size rule needs values up to {LARGEST_SIDE} pixels, not {shown}"
        )
    try:
        return SizeRule(**values)
    except ValueError as error:
        raise ModelError(f"{where}: {error}") from error
