"""What files say of themselves in words, read with limits: it is anybody's text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowtide.core.errors import ModelError
from lowtide.models.descriptor import SizeRule

# Configurations have some hundred characters. The largest side that any model is known to ask for
# is 256: one that asks for more could not be run in parts, and asks for gigabytes.
MOST_CHARACTERS, LARGEST_SIDE = 1 << 16, 1024


def metadata_error(path: Path) -> str:
    """The beginning of such an error."""
    return f"the metadata of {path} are damaged"


def parse_json(path: Path, entry: str, text: str) -> Any:
    """An entry's JSON; raises `ModelError` for what is none, too long or nested too deep."""
    if len(text) > MOST_CHARACTERS:
        raise ModelError(f"{metadata_error(path)}: {entry} has {len(text)} characters")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{metadata_error(path)}: {entry}: {error}") from error


def size_rule(where: str, values: Any) -> SizeRule:
    """The rule for sizes in a table of its fields; raises `ModelError`, which begins with
    ``where``, for one that makes no sense or asks for sides above `LARGEST_SIDE`."""
    known = {"minimum": int, "multiple_of": int, "square": bool}
    if not isinstance(values, Mapping) or not set(values) <= set(known):
        raise ModelError(f"{where}: a rule for sizes has the fields {', '.join(known)} alone")
    wrong = [name for name, value in values.items() if type(value) is not known[name]]
    if wrong or max([0, *values.values()]) > LARGEST_SIDE:
        shown = ", ".join(f"{name} {str(value)[:20]}" for name, value in values.items())
        raise ModelError(f"{where}: a rule for sizes up to {LARGEST_SIDE} pixels, not {shown}")
    try:
        return SizeRule(**values)
    except ValueError as error:
        raise ModelError(f"{where}: {error}") from error
