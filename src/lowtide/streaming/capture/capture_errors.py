"""Plain error messages for modules that cannot be captured."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Iterator

from torch import fx

# Names of PyTorch's exceptions: some are in libraries that only a capture loads.
_DATA_DEPENDENT_ERRORS = frozenset(
    {
        "DataDependentOutputException",
        "DynamicOutputShapeException",
        "GuardOnDataDependentSymNode",
    }
)
_WHOLE = "run it whole"


def capture_error_reason(error: Exception) -> tuple[str, str]:
    """Return (reason, hint) for an error of `torch.export`."""
    if type(error).__name__ in _DATA_DEPENDENT_ERRORS or "data-dependent" in str(error):
        return (
            "its control flow, or the shape of a tensor in it, depends on the values of the image",
            _WHOLE,
        )
    if isinstance(error, TypeError) and "argument" in str(error):
        return (
            f"the arguments of the call do not fit it: {first_line(error)}",
            "pass what its forward takes, as in stream(module)(image, timestep)",
        )
    if "fake tensor in the exported program" in str(error):
        return (
            "it computes a weight anew in each call, and writes it to itself",
            "compute it once before, as lowtide.models.fold_conv.fold_convs(module) does for SPAN;"
            f" or {_WHOLE}",
        )
    return first_line(error), _WHOLE


def first_line(error: Exception) -> str:
    """Return the first line of an error message, at most 300 characters.

    The rest is often a graph of hundreds of lines.
    """
    lines = [line.strip() for line in str(error).splitlines()]
    first = next((line for line in lines if line), "")
    if type(error) is KeyError or not first:
        first = f"{type(error).__name__} {first}".strip()
    return first if len(first) <= 300 else f"{first[:300]}…"


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
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed):
        yield
    sys.stderr.write(printed.getvalue())
