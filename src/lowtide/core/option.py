"""How settings become options of a command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Option:
    """``Annotated`` metadata of a settings field: how a command line shows it as an option.

    Attributes:
        panel: Group of options in a command's help.
        flags: Names, where they are not the field's alone.
        metavar: Name of its value in help, where the type says too little.
        example: Value as a user writes it, for hints, where the default is none or no text.
        hint: Hint for a value that it does not have, where that is more than an example.
        repeats: Whether it takes one value each time that it is given.
    """

    panel: str = "Main"
    flags: tuple[str, ...] = ()
    metavar: str | None = None
    example: Any = None
    hint: str | None = None
    repeats: bool = False
