"""Command-line options generated from a configuration class, one per key."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin

import typer
from typer.core import TyperOption

from lowtide.cli.command_group import AliasCommand

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

    from lowtide.training.run_config import RunConfig

ConfigT = TypeVar("ConfigT", bound="RunConfig")
# By path in the configuration: the option, and a function that reads its value, which may fail.
Given = dict[tuple[str, ...], tuple[str, Callable[[], Any]]]
_META, _GENERAL = "lowtide.config", "Configuration"


@dataclass(frozen=True)
class ConfigKeyAlias:
    """Another option of a key: with a value of its own, or one that stands for ``value``."""

    option: str
    path: tuple[str, ...]
    value: str | None = None


@dataclass(frozen=True)
class ConfigKey:
    """A key of a configuration file, with its field and its default in the whole."""

    path: tuple[str, ...]
    field: FieldInfo
    default: Any

    @property
    def dotted(self) -> str:
        """The path as it stands in messages."""
        return ".".join(self.path)

    @property
    def kinds(self) -> tuple[Any, ...]:
        """The types of the field, without None."""
        from lowtide.training.run_config import members_of

        return members_of(self.field.annotation)

    @property
    def is_open(self) -> bool:
        """Whether the key is a section with any keys, such as the options of a network."""
        return any(get_origin(kind) is dict and get_args(kind)[1] is Any for kind in self.kinds)

    @property
    def _is_list(self) -> bool:
        return all(get_origin(kind) in (list, tuple) for kind in self.kinds)

    def read(self, name: str, value: Any) -> Any:
        """Return the value of option ``name``: text is YAML, unless the key is text itself.

        Lists need no brackets: 96,192, or -1.
        """
        if not isinstance(value, str):
            return list(value) if isinstance(value, tuple) else value
        if all(kind in (str, Path) or _is_choice(kind) for kind in self.kinds):
            return value
        if self._is_list and "," in value and not value.lstrip().startswith(("[", "- ")):
            value = f"[{value}]"
        found = _read_yaml(name, value)
        if isinstance(found, int | float) and all(get_origin(kind) is list for kind in self.kinds):
            return [found]
        return {"type": found} if self.is_open and isinstance(found, str) else found


def _read_yaml(name: str, text: str) -> Any:
    from lowtide.training.yaml_loader import read_yaml_value

    return read_yaml_value(text, f"{name} {text[:40]}")


def _is_choice(kind: Any) -> bool:
    return get_origin(kind) is Literal and all(isinstance(one, str) for one in get_args(kind))


def option_name(path: tuple[str, ...]) -> str:
    """Return the long option of a key: its dotted path."""
    return "--" + ".".join(path).replace("_", "-")


def config_keys(
    config: type[BaseModel], whole: Any = None, path: tuple[str, ...] = ()
) -> Iterator[ConfigKey]:
    """Yield the keys of a configuration class in order, sections expanded in place."""
    from lowtide.training.run_config import section_of

    for name, field in config.model_fields.items():
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        if whole is not None:
            default = getattr(whole, name)
        section = section_of(field.annotation)
        if section is not None:
            yield from config_keys(section, default, (*path, name))
        else:
            yield ConfigKey((*path, name), field, default)


class ConfigCommand(AliasCommand):
    """Command with an option for each key of a configuration, read when it is called.

    Help has one name for each key, in panels that say the rest of its path.
    """

    config: Callable[[], type[BaseModel]]
    aliases: tuple[ConfigKeyAlias, ...] = ()
    _made: list[tuple[ConfigKey, TyperOption, str | None]] | None = None

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the command's own parameters and the configuration's."""
        own = super().get_params(ctx)
        return [*own, *(option for _, option, _ in self._options(own))]

    def _options(self, own: list[Any]) -> list[tuple[ConfigKey, TyperOption, str | None]]:
        """Return the option of each key: its last name where that is unique, and its path.

        Aliases that stand for a value, which comes last, are options of their own.
        """
        if self._made is None:
            keys = {key.path: key for key in config_keys(self.config())}
            last = [path[-1] for path in keys] + [one.name for one in own]
            self._made = [
                (key, _option(key, last.count(path[-1]) == 1, self._more_names(path)), None)
                for path, key in keys.items()
            ]
            flags = [alias for alias in self.aliases if alias.value is not None]
            self._made += [(keys[alias.path], _flag(alias), alias.value) for alias in flags]
        return self._made

    def _more_names(self, path: tuple[str, ...]) -> list[str]:
        return [one.option for one in self.aliases if one.path == path and one.value is None]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take options of open sections, such as ``--network-g.blocks 3``, then the others."""
        keys = [key for key, *_ in self._options(super().get_params(ctx)) if key.is_open]
        rest, more = _take_open(args, keys)
        ctx.meta[_META] = more
        return super().parse_args(ctx, rest)

    def invoke(self, ctx: Any) -> Any:
        """Run the command with the given options of the configuration in ``ctx.meta``."""
        given: Given = {}
        for key, option, fixed in self._made or []:
            value = ctx.params.pop(option.name)
            source = ctx.get_parameter_source(option.name)
            if source is not None and source.name == "COMMANDLINE":
                name = option.opts[0]
                given[key.path] = name, partial(key.read, name, value if fixed is None else fixed)
        ctx.meta[_META] = given | ctx.meta[_META]
        return super().invoke(ctx)


def config_command(
    config: Callable[[], type[BaseModel]], aliases: tuple[ConfigKeyAlias, ...] = ()
) -> type[ConfigCommand]:
    """Return the class of the commands that have the keys of a configuration as options."""
    made = {"config": staticmethod(config), "aliases": aliases}
    return type("ConfigCommandOf", (ConfigCommand,), made)


def _flag(alias: ConfigKeyAlias) -> TyperOption:
    """Build the option that stands for a value of a key."""
    assert alias.value is not None
    name = option_name(alias.path)
    return TyperOption(
        param_decls=["config_" + alias.option.strip("-").replace("-", "_"), alias.option],
        type=None,
        is_flag=True,
        default=False,
        show_default=False,
        help=f"The same as {name} {alias.value}.",
        rich_help_panel=".".join(alias.path[:-1]) or _GENERAL,
    )


def _option(key: ConfigKey, unique: bool, more_names: Sequence[str]) -> TyperOption:
    """Build the option of a key, whose last name is ``unique`` or not."""
    paths = dict.fromkeys((key.path[-1:], key.path) if unique else (key.path,))
    names = [*(option_name(path) for path in paths), *more_names]
    flag, folders = key.kinds == (bool,), key.kinds == (list[Path],)
    shown = _shown(key.default)
    return TyperOption(
        param_decls=[
            "config_" + "_".join(key.path),
            *(f"{name}/--no-{name[2:]}" if flag else name for name in names),
        ],
        type=None if flag else str,
        is_flag=flag,
        multiple=folders,
        default=key.default if flag else (None if folders else shown),
        show_default=shown is not None,
        metavar=None if flag else _metavar(key),
        help=key.field.description,
        rich_help_panel=".".join(key.path[:-1]) or _GENERAL,
    )


def _shown(default: Any) -> str | None:
    """Return a default as a user would write it, or None if it says nothing."""
    if default is None or default in ([], {}):
        return None
    if isinstance(default, bool):
        return "true" if default else "false"
    if isinstance(default, list | tuple):
        return f"[{', '.join(_shown(one) or '' for one in default)}]"
    if isinstance(default, dict):
        return f"{{{', '.join(f'{name}: {_shown(one)}' for name, one in default.items())}}}"
    if hasattr(default, "model_dump"):
        return _shown(default.model_dump(exclude_defaults=True) or {"type": default.type})
    return str(default)


def _metavar(key: ConfigKey) -> str:
    kind = key.kinds[0]
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    if kind == list[Path]:
        return "FOLDER"
    return {int: "INTEGER", float: "NUMBER", str: "TEXT", Path: "FILE"}.get(kind, "YAML")


def _take_open(args: list[str], keys: Collection[ConfigKey]) -> tuple[list[str], Given]:
    """Split off options of open sections; return the other words and their values."""
    found: Given = {}
    by_name = {option_name(key.path): key for key in keys}
    rest, words = [], iter(args)
    for word in words:
        match = re.fullmatch(r"(--[\w.-]+)\.([\w-]+)(?:=(.*))?", word, re.DOTALL)
        key = by_name.get(match[1]) if match else None
        if match is None or key is None:
            rest.append(word)
            if word == "--":
                rest.extend(words)
            continue
        name, text = f"{match[1]}.{match[2]}", match[3]
        text = next(words, None) if text is None else text
        if text is None:
            raise typer.BadParameter(f"{name} needs a value")
        found[(*key.path, match[2].replace("-", "_"))] = name, partial(_read_yaml, name, text)
    return rest, found


def config_from_options(
    config: type[ConfigT],
    context: Any,
    path: Path | None,
    defaults: Given,
) -> ConfigT | None:
    """Return the configuration of a `ConfigCommand`'s call; None if nothing is given.

    ``path`` is its file. Options override ``defaults``, and both override the file. Messages name
    the option that gave a value, and what is missing without a file by its option.
    """
    from lowtide.training.yaml_loader import read_yaml

    given = {**defaults, **context.meta[_META]}
    if path is None and not given:
        return None
    values = read_yaml(path) if path is not None else {}
    names: dict[str, str] = {}
    if path is None:
        names |= {key.dotted: option_name(key.path) for key in config_keys(config)}
        _add_required(values, config)
    for key, (name, read) in given.items():
        _set_value(values, key, read(), config)
        names[".".join(key)] = name
    return config.from_values(values, str(path or "options"), names)


def _add_required(values: dict[str, Any], config: type[BaseModel]) -> None:
    """Add required sections, so that errors name the keys missing in them."""
    from lowtide.training.run_config import section_of

    for name, field in config.model_fields.items():
        section = section_of(field.annotation)
        if section is not None and field.is_required():
            _add_required(values.setdefault(name, {}), section)


def _set_value(
    values: dict[str, Any], path: tuple[str, ...], value: Any, config: type[BaseModel]
) -> None:
    """Set a key in plain values, in place; a missing section gets its defaults first.

    Where the values have something else in the place of a section it stays, to be refused.
    """
    from lowtide.training.run_config import section_of

    section: type[BaseModel] | None = config
    for name in path[:-1]:
        field = section.model_fields[name] if section is not None else None
        if values.get(name) is None:
            default = None if field is None or field.is_required() else field.get_default()
            dump = getattr(default, "model_dump", None)
            values[name] = dump() if dump is not None else copy.deepcopy(default) or {}
        if not isinstance(values[name], dict):
            return
        values = values[name]
        section = section_of(field.annotation) if field is not None else None
    values[path[-1]] = value
