"""Why a module cannot be captured, in plain words."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Iterator

from torch import fx

# PyTorch's, of which some are in libraries that only captures load.
_BY_VALUES = frozenset(
    {
        "DataDependentOutputException",
        "DynamicOutputShapeException",
        "GuardOnDataDependentSymNode",
    }
)
_WHOLE = "run it whole"


def capture_error_reason(error: Exception) -> tuple[str, str]:
    """What is wrong, in half a sentence, and what would work."""
    if type(error).__name__ in _BY_VALUES or "data-dependent" in str(error):
        return "what it does, or a shape in it, depends on the values of the image", _WHOLE
    if isinstance(error, TypeError) and "argument" in str(error):
        return (
            f"it is given an image alone: {first_line(error)}",
            "wrap it in a module that takes the image and gives it the others",
        )
    return first_line(error), _WHOLE


def first_line(error: Exception) -> str:
    """What an error says, without what follows: graphs have hundreds of lines."""
    lines = [line.strip() for line in str(error).splitlines()]
    said = next((line for line in lines if line), "")
    if type(error) is KeyError or not said:
        said = f"{type(error).__name__} {said}".strip()
    return said if len(said) <= 300 else f"{said[:300]}…"


def module_path_of(node: fx.Node) -> str:
    """The part of the model that an operator is of, or nothing for the model itself."""
    stack = node.meta.get("nn_module_stack") or {}
    path = next((entry[0] for entry in reversed(stack.values())), "")
    return re.sub(r"^(L\['self'\])?\.?module\.?", "", path)


@contextlib.contextmanager
def silence_graph_printing() -> Iterator[None]:
    """Inside, PyTorch's printing of a graph that it gives up on goes nowhere."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        yield
    sys.stderr.write(said.getvalue())
