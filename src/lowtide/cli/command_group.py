"""Groups of commands, each of which is imported when it is named."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup


class AliasCommand(TyperCommand):
    """Command whose help shows one long name of each option: the others are aliases."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write help without aliases."""
        params = self.get_params(ctx)
        names = [(one.opts, one.secondary_opts) for one in params]
        for one in params:
            one.opts, one.secondary_opts = _shown(one.opts), _shown(one.secondary_opts)
        try:
            super().format_help(ctx, formatter)
        finally:
            for one, (opts, secondary) in zip(params, names, strict=True):
                one.opts, one.secondary_opts = opts, secondary


def _shown(names: list[str]) -> list[str]:
    long = [name for name in names if name.startswith("--")]
    return [name for name in names if name not in long[1:]]


def make_command(
    function: Callable[..., Any], name: str, cls: type[TyperCommand] = AliasCommand
) -> Any:
    """Return the command that calls ``function``; it refuses empty names of files.

    Unset variables give such names, which Python takes for this folder.
    """
    alone = typer.Typer(add_completion=False)
    alone.command(name, cls=cls)(function)
    command: Any = typer.main.get_command(alone)
    for parameter in command.params:
        if type(parameter.type).__name__ in ("TyperPath", "Path"):  # Typer's, or click's
            parameter.type.convert = functools.partial(_convert_name, parameter.type.convert)
    return command


def _convert_name(convert: Callable[..., Any], value: Any, *more: Any) -> Any:
    if value == "":
        raise typer.BadParameter("the name is empty: is a variable not set?", *more[::-1])
    return convert(value, *more)


class LazyCommands(Mapping[str, Any]):
    """Commands by name, from a table of where they are and what help says of them in a line.

    A place is "module:name" in `lowtide.cli`, of a function or a finished command; a table in the
    place of one is a group.
    """

    def __init__(self, table: Mapping[str, tuple[str | Mapping[str, Any], str]]) -> None:
        self._table = table
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            where, summary = self._table[name]
            if isinstance(where, str):
                module, _, attribute = where.partition(":")
                found = getattr(importlib.import_module(f"lowtide.cli.{module}"), attribute)
                is_made = isinstance(found, TyperCommand)
                self._made[name] = found if is_made else make_command(found, name)
            else:
                self._made[name] = LazyGroup(where, name=name, help=summary, no_args_is_help=True)
        return self._made[name]

    def __contains__(self, name: object) -> bool:  # of `Mapping`, it would import the command
        return name in self._table

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)

    def line_of_help(self, name: str) -> TyperCommand:
        """Return a command that is good for its line in the help of its group, and no more."""
        return TyperCommand(name, help=self._table[name][1])


class LazyGroup(TyperGroup):
    """Group of commands, each of which is imported when it is named; help imports none."""

    def __init__(
        self, table: Mapping[str, tuple[str | Mapping[str, Any], str]], **more: Any
    ) -> None:
        super().__init__(**more)
        self.commands = self._lazy = LazyCommands(table)  # pyright: ignore[reportAttributeAccessIssue]
        self._shows_help = False

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands in the order of the table."""
        return list(self._lazy)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, imported unless help asks for its line."""
        if self._shows_help:
            return self._lazy.line_of_help(cmd_name)
        return self._lazy.get(cmd_name)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write help with a line for each command."""
        self._shows_help = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._shows_help = False
