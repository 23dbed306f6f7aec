"""Plain error messages for modules that cannot be captured."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Iterator

from torch import fx

# Names of PyTorch's exceptions: some are in libraries that only a capture loads.
_BY_VALUES = frozenset(
    {
        "DataDependentOutputException",
        "DynamicOutputShapeException",
        "GuardOnDataDependentSymNode",
    }
)
_WHOLE = "run it whole"


def capture_error_reason(error: Exception) -> tuple[str, str]:
    """Return (reason, hint) for an error of `torch.export`."""
    if type(error).__name__ in _BY_VALUES or "data-dependent" in str(error):
        return "what it does, or a shape in it, depends on the values of the image", _WHOLE
    if isinstance(error, TypeError) and "argument" in str(error):
        return (
            f"it is given an image alone: {first_line(error)}",
            "wrap it in a module that takes the image and gives it the others",
        )
    return first_line(error), _WHOLE


def first_line(error: Exception) -> str:
    """Return the first line of an error message, at most 300 characters.

    The rest is often a graph of hundreds of lines.
    """
    lines = [line.strip() for line in str(error).splitlines()]
    said = next((line for line in lines if line), "")
    if type(error) is KeyError or not said:
        said = f"{type(error).__name__} {said}".strip()
    return said if len(said) <= 300 else f"{said[:300]}…"


def module_path_of(node: fx.Node) -> str:
    """Return the path of the module that an fx node belongs to; empty for the model."""
    stack = node.meta.get("nn_module_stack") or {}
    path = next((entry[0] for entry in reversed(stack.values())), "")
    return re.sub(r"^(L\['self'\])?\.?module\.?", "", path)


@contextlib.contextmanager
def silence_graph_printing() -> Iterator[None]:
    """Keep PyTorch from printing a graph that fails to export.

    What is printed goes to stderr only if the capture succeeds.
    """
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        yield
    sys.stderr.write(said.getvalue())
