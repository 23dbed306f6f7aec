"""Exception hierarchy of Lowtide, with the exit codes of the command line.

    LowtideError                 exit code 1
    ├── UsageError               2   an invalid option or argument
    ├── InputError               2   a file that cannot be used
    │   ├── ImageError           2   ... an image
    │   ├── VideoError           2   ... a video
    │   └── ModelError           2   ... a model file, or a model that does not fit the job
    ├── BudgetError              3   no plan fits the budget; carries the smallest that would
    ├── OutputError              1   the result cannot be written
    ├── NotFiniteError           1   the model returned NaN or infinity
    ├── OutOfMemoryError         1   memory ran out and every smaller step was tried
    ├── BatchError               4   some inputs of a batch failed, the others are done
    └── Cancelled              130   interrupted by the caller

A message says what happened, where, and with which figures. ``hint`` is a command or a change that
would work, of an unknown name by `hint_for_name`; the command line prints it on a line of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

# Characters of a message, and of a value in it, above which they are cut short: files hold names
# and cells of megabytes.
_MOST_IN_MESSAGE, _MOST_SHOWN = 4000, 60


class LowtideError(Exception):
    """Base class of Lowtide's errors; ``exit_code`` is that of the command line."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        message = shorten_middle(message, _MOST_IN_MESSAGE)
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(LowtideError):
    """An invalid option or argument, alone or in combination with another."""

    exit_code = 2


class InputError(LowtideError):
    """A file that cannot be used."""

    exit_code = 2


class ImageError(InputError):
    """An image that is damaged, too large, or not an image."""


class VideoError(InputError):
    """A video that is damaged, or of a kind that cannot be converted."""


class ModelError(InputError):
    """A model file that cannot be loaded, or a model that does not fit the job."""


class OutputError(LowtideError):
    """A result that cannot be written: no permission, no space, or a format's limit."""


class NotFiniteError(LowtideError):
    """The model or a training step returned NaN or infinity.

    If the model was rerun in fp32, there too.
    """

    def __init__(
        self,
        message: str = "the model returned values that are not finite (NaN or infinity)",
        *,
        hint: str = "the weights may be damaged; try --precision fp32 or another model",
    ) -> None:
        super().__init__(message, hint=hint)


class OutOfMemoryError(LowtideError):
    """Memory ran out and every smaller step was tried."""


class BudgetError(LowtideError):
    """No plan fits the budget.

    ``smallest`` is the budget in bytes of the cheapest plan that would work, if one would.
    """

    exit_code = 3

    def __init__(
        self, message: str, *, smallest: int | None = None, hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.smallest = smallest


class BatchError(LowtideError):
    """Some inputs of a batch failed; ``failures`` maps each to its error message."""

    exit_code = 4

    def __init__(self, message: str, *, failures: dict[str, str], hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.failures = failures


class Cancelled(LowtideError):  # noqa: N818  (an interruption, not a fault)
    """The caller asked to stop; finished results are kept, partial ones removed."""

    exit_code = 130


def short_repr(value: object) -> str:
    """Return a value as Python writes it, with its middle left out where it is long."""
    return shorten_middle(repr(value))


def shorten_middle(text: str, most: int = _MOST_SHOWN) -> str:
    """Return a text with its middle left out where it has more than ``most`` characters."""
    return text if len(text) <= most else f"{text[: most * 3 // 4]} … {text[-most // 4 :]}"


def closest_name(name: str, known: Iterable[str]) -> str | None:
    """Return the name in ``known`` most similar to ``name``, or None."""
    import difflib

    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)), None)


def hint_for_name(name: str, known: Iterable[str]) -> str:
    """Return a hint for an unknown ``name``: the closest known one, or all of them."""
    names = list(known)
    meant = closest_name(name, names)
    return f"did you mean {meant!r}?" if meant else f"use one of {', '.join(names)}"


_WHERE = "in the folder of Lowtide's sources"
REINSTALL = f"{_WHERE}: pip install --force-reinstall ."


def install_extra(name: str) -> str:
    """Return the hint that installs an extra, such as ``"video"``."""
    return f"{_WHERE}: pip install '.[{name}]'"


# Changes that are named; of more, their number is.
_MOST_NAMED = 8


def describe_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the dotted keys whose values differ, with the earlier value and the new one.

    Empty where none does.
    """
    old, new = dict(_leaves(before)), dict(_leaves(now))
    found = [
        f"{key} was {_word(old, key)} and is {_word(new, key)}"
        for key in dict.fromkeys([*old, *new])
        if key not in old or key not in new or old[key] != new[key]
    ]
    more = f", and {len(found) - _MOST_NAMED:,} more" if len(found) > _MOST_NAMED else ""
    return ", ".join(found[:_MOST_NAMED]) + more


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _word(values: Mapping[str, Any], key: str) -> str:
    return short_repr(values[key]) if key in values else "absent"
