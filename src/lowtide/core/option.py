"""How settings become options of a command line, and the types that many settings have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

# Sizes made of larger ones pass 64 bits.
MOST_COUNT = 2**31 - 1
Count = Annotated[int, Ge(1), Le(MOST_COUNT)]
# One bound for the seeds of all commands.
MOST_SEED = 2**63 - 1
Seed = Annotated[int, Ge(0), Le(MOST_SEED)]


@dataclass(frozen=True)
class Option:
    """``Annotated`` metadata of a settings field: how a command line shows it as an option.

    Attributes:
        panel: Group of options in a command's help.
        flags: Names, where they are not the field's alone. Help shows the first long one.
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


Precision = Literal["fp32", "bf16", "fp16"]
