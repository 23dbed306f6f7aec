"""Command-line options made from a settings class: one for each of its fields."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from lowtide.cli.common_options import option
from lowtide.jobs.engine.settings import SettingsField, settings_fields

_KINDS = (bool, int, float, Path)


def with_settings(
    settings: Any,
    order: str = "",
    *,
    flags: Mapping[str, Any] | None = None,
    only: str = "",
    without: str = "",
) -> Callable[[Any], Any]:
    """Decorate a command with ``**settings`` so that it has an option for each field.

    It also gets the ``flags`` of `common_options`. A parameter of the command itself takes the
    place of a field of its name. In help the names in ``order`` come first, then the other fields,
    then the command's own and the flags. Fields in ``without`` have no option, and
    where some are named in ``only``, no others have one.
    """
    places = order.split()

    def place(one: inspect.Parameter) -> int:
        return places.index(one.name) if one.name in places else len(places)

    def decorate(command: Any) -> Any:
        shape = inspect.signature(command, eval_str=True)
        fields = settings_fields(settings).items()
        found = {
            name: _parameter(name, field)
            for name, field in fields
            if name not in without.split() and (not only or name in only.split())
        }
        for name, one in shape.parameters.items():
            if one.kind is not inspect.Parameter.VAR_KEYWORD:
                found[name] = one.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, kind in (flags or {}).items():
            found[name] = inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=kind
            )
        command.__signature__ = shape.replace(parameters=sorted(found.values(), key=place))
        return command

    return decorate


def _parameter(name: str, field: SettingsField) -> inspect.Parameter:
    """Return the parameter of a command for a field of a settings class."""
    kind, default, how = _kind(field.type), field.default, field.option
    flags, long = how.flags, "--" + name.replace("_", "-")
    if isinstance(default, tuple):
        kind, default = list[_kind(field.item)] if how.repeats else str, None
    metavar = how.metavar
    if how.hint is not None:  # the settings refuse an unknown value, with this hint
        kind, metavar = str, f"<{'|'.join(get_args(kind))}>"
    if kind is bool and not flags:
        flags = (long if default is False else f"{long}/--no-{long[2:]}",)
    shown = option(*flags, panel=how.panel, metavar=metavar, help=field.help)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind if default is not None else kind | None, shown],
    )


def _kind(hint: Any) -> Any:
    """Return the type of an option: one of those that commands know, choices, or text."""
    kinds = [one for one in get_args(hint) or (hint,) if one is not NoneType]
    if get_origin(hint) is Literal:
        return hint
    if all(get_origin(one) is Literal for one in kinds):
        words = [word for one in kinds for word in get_args(one)]
        return Literal[tuple(sorted(words, key=lambda word: word != "auto"))]  # "auto" first
    first = get_args(kinds[0])[0] if get_origin(kinds[0]) is Annotated else kinds[0]
    return first if len(kinds) == 1 and first in _KINDS else str
