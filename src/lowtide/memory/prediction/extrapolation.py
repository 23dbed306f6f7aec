"""Peak-memory extrapolation from small real runs, where tracing fails."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lowtide.core.errors import ModelError
from lowtide.memory.costs import fit_growth
from lowtide.memory.live_peak import live_peak_bytes
from lowtide.memory.plan import device_row
from lowtide.memory.prediction.result import PredictedMemory
from lowtide.memory.tracing.fake import model_tensors
from lowtide.memory.tracing.steps import (
    InferenceStep,
    NullStepObserver,
    Step,
    TrainingStep,
    input_tensors,
)

# Shares of each side. Real runs at a quarter and at half of it take a sixteenth and a quarter of
# the memory.
_SHARES = (0.125, 0.25, 0.5)
_MAX_RUN_BYTES = 1 << 29
_UPPER_FACTOR = 1.3


def extrapolate_peak(
    model: nn.Module, step: Step, reason: Exception, dtype: torch.dtype | None
) -> PredictedMemory:
    """Extrapolate the peak bytes of ``step`` from real CPU runs on smaller inputs.

    The runs take smaller images or fewer tokens.

    Args:
        model: Module with real weights; a copy of it is run.
        step: The step at full size.
        reason: Why the model could not be traced, for notes and errors.
        dtype: Type that weights and inputs are converted to; by default their own.

    Raises:
        ModelError: From ``reason``, where the model does not run on smaller inputs either, or is
            on the ``meta`` device.
    """
    try:
        model = copy.deepcopy(model)
    except Exception as error:  # of any attribute
        raise _failure(reason, f"it cannot be copied to run it instead: {error}") from error
    if dtype is not None:
        model = model.to(dtype)
    weight_bytes = sum(tensor.untyped_storage().nbytes() for tensor in model_tensors(model))
    points: list[tuple[int, int]] = []
    for share in _SHARES:
        small = _smaller(step, share, dtype)
        size = sum(tensor.numel() for tensor in input_tensors(small))
        if points and (size <= points[-1][0] or points[-1][1] > _MAX_RUN_BYTES):
            continue
        points.append((size, _real_peak(model, small, reason)))
    if len(points) < 2:
        raise _failure(reason, "its inputs are too small to be made smaller")
    fixed, linear, square = fit_growth(points)
    size = sum(tensor.numel() for tensor in input_tensors(step))
    activations = int(fixed + linear * size + square * size**2)
    rows = (
        device_row("weights", weight_bytes, "known"),
        device_row(
            "live activations and workspace",
            activations,
            "probed",
            int(activations * _UPPER_FACTOR),
        ),
    )
    note = (
        f"could not be traced ({_first_line(reason)}); extrapolated from {len(points)} real runs"
        " on smaller inputs"
    )
    return PredictedMemory(rows, "", "", weight_bytes + activations, (note,))


def _real_peak(model: nn.Module, step: Step, reason: Exception) -> int:
    if any(tensor.is_meta for tensor in model_tensors(model)):
        raise _failure(reason, "a model on the meta device cannot be run instead")
    try:
        run = step.prepare(model)
        return live_peak_bytes(lambda: run(NullStepObserver()))
    except Exception as error:
        raise _failure(reason, f"a real run on smaller inputs failed too: {error}") from error


def _failure(reason: Exception, detail: str) -> ModelError:
    return ModelError(
        f"the model's memory could not be estimated: tracing failed ({_first_line(reason)}),"
        f" and {detail}",
        hint="check that the model accepts these inputs: run it once with real ones",
    )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0][:200]


def _smaller(step: Step, share: float, dtype: torch.dtype | None) -> Step:
    def shrink(tree: Any) -> Any:
        return tree_map_only(Tensor, lambda tensor: _shrink(tensor, share, dtype), tree)

    changed = {"inputs": shrink(step.inputs), "keywords": shrink(dict(step.keywords))}
    if isinstance(step, InferenceStep):
        return dataclasses.replace(step, **changed)
    assert isinstance(step, TrainingStep)
    return dataclasses.replace(step, validation=shrink(step.validation), **changed)


def _shrink(tensor: Tensor, share: float, dtype: torch.dtype | None) -> Tensor:
    """Return zeros with fewer rows and columns of an image or clip, or fewer tokens."""
    shape = list(tensor.shape)
    sides = {3: (1,), 4: (2, 3), 5: (3, 4)}.get(tensor.dim(), ())
    for side in sides:
        shape[side] = min(shape[side], max(16, round(shape[side] * share / 16) * 16))
    kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return torch.zeros(shape, dtype=kind, requires_grad=tensor.requires_grad)
