"""Calls of fitted modules in fp16 whose values exceed its range: made again in fp32."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lowtide.core.errors import BudgetError

# Runs the module, or a copy of it, on its input.
Run = Callable[[Any, Tensor], Any]


def run_in_range(title: str, module: nn.Module, given: Tensor, run: Run) -> Any:
    """Return the result of a module; where fp16 overflows, that of a copy in fp32.

    Where fp32 does not fit the budget, the copy is in bf16. The result has the dtype of the first
    one, and a warning says what was done. The copy is freed again.

    Args:
        title: Name of the module in the warning.
        module: The fitted module.
        given: Its input (B, C, ...).
        run: Called with the module and its input.

    Raises:
        BudgetError: The copy does not fit in bf16 either.
    """
    made = run(module, given)
    if not _exceeds_fp16(given, _tensors(made)):
        return made
    dtypes = {one.dtype for one in _tensors(made)}
    del made
    wide = copy.deepcopy(module).float()
    with torch.autocast(given.device.type, enabled=False):
        try:
            made, name = run(wide, given.float()), "float32"
        except BudgetError:
            made, name = run(wide.bfloat16(), given.bfloat16()), "bfloat16"
    warnings.warn(
        f"values of {title} exceed the range of float16: the call was made again in {name}, which"
        " takes its weights once more; module.to(torch.float32) or bfloat16 saves the first one",
        stacklevel=2,
    )
    (dtype,) = dtypes
    return tree_map_only(Tensor, lambda one: one.to(dtype), made)


def _exceeds_fp16(given: Tensor, made: Iterable[Tensor]) -> bool:
    """Return whether results in fp16 have NaN or infinity, and the input is finite."""
    return any(one.dtype == torch.float16 and not _is_finite(one) for one in made) and _is_finite(
        given
    )


def _is_finite(tensor: Tensor) -> bool:
    # image by image and frame by frame, since the mask is half as large as what it is of
    return all(
        bool(frame.isfinite().all())
        for one in tensor.unbind(0)
        for frame in (one.unbind(1) if one.dim() > 3 else (one,))
    )


def _tensors(result: Any) -> list[Tensor]:
    return [one for one in tree_leaves(result) if isinstance(one, Tensor)]
