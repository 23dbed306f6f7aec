"""Safe YAML reader for configurations, with limits on size, nesting and aliases.

Values reached through aliases and merges count each time they are expanded, so that a short file
cannot expand to more time or memory than the limits allow.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import yaml

from lowtide.core.errors import UsageError

_MAX_BYTES = 256 << 10
_MAX_VALUES = 20_000
_MAX_DEPTH = 50
_MAX_NUMBER_LENGTH = 64
_MAX_INTEGER = 2**63 - 1
_MAX_REASON_LENGTH = 300
_TAG = "tag:yaml.org,2002:"


def read_yaml(path: Path) -> dict[str, Any]:
    """Read the mapping of a UTF-8 YAML file as plain Python values.

    Values are str, int, float, bool, None, lists, and dicts with str keys.

    Raises:
        UsageError: With the line, for a file that cannot be read or is no YAML, for duplicate or
            non-string keys, integers of more than 64 bits, inf, NaN and tags; and for more than
            256 KiB, 20,000 values or 50 levels, with aliases expanded.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise UsageError(
                f"{path} is larger than {_MAX_BYTES >> 10} KiB, the limit for a configuration"
            )
        text = data.decode("utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    found = read_value(text, str(path))
    if not isinstance(found, dict):
        raise UsageError(f"{path} has no entries", hint="`lowtide train KIND --example` prints one")
    return found


def read_value(text: str, source: str) -> Any:
    """Read the value of a YAML text; raises as `read_yaml`, naming ``source``."""
    try:
        node = _Composer(text).get_single_node()
        return _ValueBuilder().build(node, 1) if node is not None else None
    except yaml.YAMLError as error:
        raise UsageError(f"{source}{_describe_error(error)}") from error
    # PyYAML itself raises these for characters and versions out of range.
    except (ValueError, OverflowError) as error:
        raise UsageError(
            f"{source} is not valid YAML: {str(error)[:_MAX_REASON_LENGTH]}"
        ) from error


class _NotAllowed(yaml.YAMLError):
    """Error for YAML that is valid but not allowed in a configuration, with its line."""

    def __init__(self, node: yaml.Node, reason: str) -> None:
        super().__init__(reason)
        self.line, self.reason = node.start_mark.line + 1, reason


def _describe_error(error: yaml.YAMLError) -> str:
    if isinstance(error, _NotAllowed):
        return f", line {error.line}: {error.reason}"
    return f" is not valid YAML: {' '.join(str(error).split())[:_MAX_REASON_LENGTH]}"


class _Composer(yaml.SafeLoader):
    """YAML composer with a nesting limit, since each level also recurses in Python."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose one node with its children; refuses nodes nested too deep."""
        if self._depth == _MAX_DEPTH:
            assert parent is not None
            raise _NotAllowed(parent, f"more than {_MAX_DEPTH} levels")
        self._depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1


class _ValueBuilder:
    """Converter of YAML nodes to Python values, with aliases expanded and counted."""

    def __init__(self) -> None:
        self._scalar_loader, self._count = yaml.SafeLoader(""), 0

    def build(self, node: yaml.Node, depth: int) -> Any:
        """Return the Python value of ``node`` at nesting depth ``depth``."""
        self._count += 1
        if self._count > _MAX_VALUES:
            raise _NotAllowed(node, f"more than {_MAX_VALUES:,} values, aliases expanded")
        if depth > _MAX_DEPTH:
            raise _NotAllowed(node, f"more than {_MAX_DEPTH} levels; does an alias contain itself?")
        kind = node.tag.removeprefix(_TAG)
        if isinstance(node, yaml.MappingNode) and kind == "map":
            return self._mapping(node, depth)
        if isinstance(node, yaml.SequenceNode) and kind == "seq":
            return [self.build(one, depth + 1) for one in node.value]
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, kind)
        raise _NotAllowed(node, f"the tag {_shorten(node.tag)} is not supported")

    def _mapping(self, node: yaml.MappingNode, depth: int) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        merged: yaml.Node | None = None
        for key, value in node.value:
            if key.tag == f"{_TAG}merge" and merged is None:
                merged = value
                continue
            name = _key_name(key)
            if name in entries:
                raise _NotAllowed(key, f"{_shorten(name)} is a duplicate key")
            entries[name] = self.build(value, depth + 1)
        if merged is None:
            return entries
        sources = merged.value if isinstance(merged, yaml.SequenceNode) else [merged]
        for source in sources:
            inherited = self.build(source, depth + 1)
            if not isinstance(inherited, dict):
                raise _NotAllowed(source, "<< takes a mapping, or a list of mappings")
            entries = {**inherited, **entries}
        return entries

    def _scalar(self, node: yaml.ScalarNode, kind: str) -> Any:
        if kind == "str":
            if "\0" in node.value or any("\ud800" <= letter <= "\udfff" for letter in node.value):
                raise _NotAllowed(node, "a character that is not allowed in text")
            return node.value
        if kind == "null":
            return None
        make = {
            "int": self._scalar_loader.construct_yaml_int,
            "float": self._scalar_loader.construct_yaml_float,
            "bool": self._scalar_loader.construct_yaml_bool,
        }.get(kind)
        if make is None:
            raise _NotAllowed(
                node, f"{_shorten(node.value)} is a {kind[:40]}: quote it if it is text"
            )
        if len(node.value) > _MAX_NUMBER_LENGTH:
            raise _NotAllowed(node, f"a number with {len(node.value):,} digits")
        try:
            value = make(node)
        except (ValueError, LookupError) as error:
            raise _NotAllowed(node, f"{_shorten(node.value)} is not a valid {kind}") from error
        if kind == "int" and abs(value) > _MAX_INTEGER:
            raise _NotAllowed(node, f"{_shorten(node.value)} is an integer of more than 64 bits")
        if kind == "float" and not math.isfinite(value):
            raise _NotAllowed(node, f"{_shorten(node.value)} is not a finite number")
        return value


def _key_name(key: yaml.Node) -> str:
    if not isinstance(key, yaml.ScalarNode) or key.tag != f"{_TAG}str":
        shown = _shorten(key.value) if isinstance(key, yaml.ScalarNode) else "a list or mapping"
        raise _NotAllowed(key, f"{shown} is not a valid key: keys are text, quoted if needed")
    return key.value


def _shorten(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:40]}…")
