"""Descriptions of settings, from which command lines make their options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Option:
    """Description of a settings field, as ``Annotated`` metadata, for a command line.

    Attributes:
        help: What it does, in one sentence or two.
        panel: Group of options in a command's help.
        flags: Names, where they are not the field's alone.
        metavar: Name of its value in help, where the type says too little.
        example: Value as a user writes it, for hints, where the default is none or no text.
        repeats: Whether it takes one value each time that it is given.
    """

    help: str
    panel: str = "Main"
    flags: tuple[str, ...] = ()
    metavar: str | None = None
    example: Any = None
    repeats: bool = False
