"""Check that a module's result does not depend on its earlier calls.

A streamed run writes nothing: where a call reads what an earlier one wrote, as recurrent denoisers
do, it would differ. Sizes that are remembered, and what each call writes before it reads it, are no
such dependence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lowtide.core.errors import ModelError
from lowtide.core.trace_cache import TRACE_LOCK
from lowtide.memory.tracing.python_place import AttributeKey, Change, are_alike
from lowtide.memory.tracing.python_places import PythonPlaces
from lowtide.streaming.capture.attribute_use import watch_first_reads
from lowtide.streaming.capture.model_inputs import ModelInputs
from lowtide.streaming.tolerance import largest_error


def require_no_memory(
    module: nn.Module,
    inputs: ModelInputs,
    call: Callable[[ModelInputs], Sequence[Tensor]],
    whole: Sequence[Tensor],
    allowed: float,
) -> None:
    """Raise `ModelError` for a module that remembers its calls.

    Calls it with other inputs of this size, and then with ``inputs``: the result has to be that of
    a first call, and nothing that is read may change with each call. All is put back.

    Args:
        module: The module, whose calls change something that its code can reach.
        inputs: Those of a first call.
        call: Returns the tensors of a call.
        whole: Those of the first call.
        allowed: Error of an equal result, relative to its largest value.
    """
    places = PythonPlaces(module)
    with TRACE_LOCK, torch.inference_mode(), places.kept() as left:
        call(_others(inputs))
        before = places.read()
        with watch_first_reads(module) as read:
            second = call(inputs)
        changes = places.changes(before)
    remembered = [one for one in changes if _is_remembered(one, read)]
    differs = largest_error(second, whole) > allowed
    if differs or remembered:
        names = ", ".join(dict.fromkeys(one.name for one in remembered or changes or left))
        raise ModelError(
            f"this model remembers its calls in {names}, and a streamed run writes nothing there",
            hint="set it at the start of each forward, remove the hook that does it, or call the"
            " model itself",
        )


def _others(inputs: ModelInputs) -> ModelInputs:
    """Return inputs of the same sizes with other values, in the same range for images."""
    halved = inputs.with_tensors(
        [one * 0.5 if one.is_floating_point() else one for one in inputs.tensors]
    )
    return halved.with_streamed(
        [1 - one if one.is_floating_point() else one for one in inputs.streamed]
    )


def _is_remembered(change: Change, read: set[AttributeKey]) -> bool:
    """Whether what one call wrote counts in the next.

    Of tensors that others replaced, anywhere but in an attribute, the results tell.
    """
    if change.owned:
        return change.attribute in read
    return not change.is_report and not are_alike(
        change.before, change.after, lambda one, other: one.shape == other.shape
    )
