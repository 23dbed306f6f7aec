"""YAML of configurations by PyYAML's safe loader, with limits and without duplicate keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from yaml.composer import ComposerError

from lowtide.core.errors import UsageError
from lowtide.core.input_file import require_input

_MAX_BYTES = 256 << 10
_MAX_VALUES = 20_000
_MAX_DEPTH = 50
_MAX_NUMBER_LENGTH = 64
_MAX_REASON_LENGTH = 300
_TAG = "tag:yaml.org,2002:"


def read_yaml(path: Path) -> dict[str, Any]:
    """Read the mapping of a UTF-8 YAML file as plain Python values.

    Raises:
        UsageError: With the line, for a file that cannot be read or is no YAML, for keys that are
            duplicate or no text, for numbers of more than 64 digits, and for more than 256 KiB,
            20,000 values with aliases expanded, or 50 levels.
    """
    require_input(path, UsageError)
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise UsageError(f"{path} is larger than {_MAX_BYTES >> 10} KiB, the most allowed")
        text = data.decode("utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    found = read_yaml_value(text, str(path))
    if not isinstance(found, dict):
        raise UsageError(f"{path} has no entries", hint="`lowtide train KIND --example` prints one")
    return found


def read_yaml_value(text: str, source: str) -> Any:
    """Read the value of a YAML text; raises as `read_yaml`, naming ``source``."""
    try:
        return _Loader(text).get_single_data()
    # PyYAML itself raises the others for characters, numbers, dates and versions out of range.
    except (yaml.YAMLError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        where = "" if isinstance(error, ComposerError) else " is not valid YAML"
        reason = " ".join(str(error).split())
        if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
            where += f", line {error.problem_mark.line + 1}"
            reason = ", ".join(filter(None, (error.context, error.problem)))
        raise UsageError(f"{source}{where}: {reason[:_MAX_REASON_LENGTH]}") from error


class _Loader(yaml.SafeLoader):
    """Safe loader that refuses duplicate keys, deep nesting, and aliases that expand to much."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._values = 0
        self._sizes: dict[str, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose one node with its children, and count them; of an alias those of its anchor."""
        event, before = self.peek_event(), self._values
        if self._depth == _MAX_DEPTH:
            raise _refusal(f"more than {_MAX_DEPTH} levels", event)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        # An anchor that contains itself has no size yet.
        alias = isinstance(event, yaml.AliasEvent)
        self._values += self._sizes.get(event.anchor, _MAX_VALUES) if alias else 1
        if self._values > _MAX_VALUES:
            raise _refusal(f"more than {_MAX_VALUES:,} values, aliases expanded", event)
        self._sizes.setdefault(event.anchor, self._values - before)
        return node

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        """Compose text, or another scalar that is short: long numbers take long to be read."""
        node = super().compose_scalar_node(anchor)
        if len(node.value) > _MAX_NUMBER_LENGTH and node.tag != f"{_TAG}str":
            raise _refusal(f"a number with {len(node.value):,} digits", node)
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Compose a mapping whose keys are text and differ."""
        node, names = super().compose_mapping_node(anchor), set()
        for key, _ in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else "a list or mapping"
            if key.tag not in (f"{_TAG}str", f"{_TAG}merge"):
                raise _refusal(f"{name[:40]!r} is no key: keys are text, quoted if needed", key)
            if name in names:
                raise _refusal(f"{name[:40]!r} is a duplicate key", key)
            names.add(name)
        return node


def _refusal(reason: str, place: Any) -> ComposerError:
    return ComposerError(None, None, reason, place.start_mark)
