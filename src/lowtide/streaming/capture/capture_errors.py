"""Plain error messages for modules that cannot be captured."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

# Names of PyTorch's exceptions: some are in libraries that only a capture loads.
_DATA_DEPENDENT_ERRORS = frozenset(
    {
        "DataDependentOutputException",
        "DynamicOutputShapeException",
        "GuardOnDataDependentSymNode",
    }
)
READS_VALUES = (
    "its control flow, a number that it reads, or the shape of a tensor in it, depends on the"
    " values of the image or of a weight"
)
_WHOLE = "run it whole"
# Ways to read a number out of a tensor whose symbols a trace goes on with.
_SYMBOLS = torch.SymBool, torch.SymInt, torch.SymFloat
_READS = frozenset({torch.Tensor.item, torch.Tensor.tolist})
# In a trace this gives a tensor another one's storage; with PyTorch 2.8 it then crashes.
_SET_DATA = torch.Tensor.data.__set__  # pyright: ignore[reportAttributeAccessIssue]
_SETS_DATA = "a weight is computed anew"


class RefuseNumbersMode(TorchFunctionMode):
    """Mode that ends a trace where a number is read that is only known when the model runs.

    Otherwise the trace goes on with a symbol, and the part that reads it is not known any more. It
    ends too where a tensor is given other values by its ``data``.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Return what ``func`` returns; raise `RuntimeError` for a symbol."""
        if func == _SET_DATA:
            raise RuntimeError(_SETS_DATA)
        result = func(*args, **(kwargs or {}))
        if func in _READS and any(isinstance(one, _SYMBOLS) for one in tree_leaves(result)):
            raise RuntimeError("a data-dependent number is read from a tensor")
        return result


def capture_error_reason(error: Exception) -> tuple[str, str]:
    """Return (reason, hint) for an error of `torch.export`."""
    if type(error).__name__ in _DATA_DEPENDENT_ERRORS or "data-dependent" in str(error):
        return READS_VALUES, _WHOLE
    if isinstance(error, TypeError) and "argument" in str(error):
        return (
            f"the arguments of the call do not fit it: {first_line(error)}",
            "pass what its forward takes, as in stream(module)(image, timestep)",
        )
    if "fake tensor in the exported program" in str(error) or str(error) == _SETS_DATA:
        return (
            "it computes a weight anew in each call, and writes it to itself",
            "compute it once before, as lowtide.models.spandrel_files.fold_convs(module) does for"
            f" SPAN; or {_WHOLE}",
        )
    return first_line(
        error
    ), "call the model itself: where that fails too, its arguments do not fit"


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
