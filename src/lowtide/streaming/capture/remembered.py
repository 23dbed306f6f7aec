"""Attributes that a module reads and sets while it runs, and what it remembers of its calls.

A streamed run writes nothing: where a call reads what an earlier one wrote, as recurrent denoisers
do, it would differ. Sizes that are remembered, and what each call writes before it reads it, are no
such dependence.

Only while `TRACE_LOCK` is held, since reads and writes of all modules of the process are watched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.core.errors import ModelError
from lowtide.core.trace_cache import TRACE_LOCK
from lowtide.memory.tracing.python_place import AttributeKey, PlaceChange, are_alike
from lowtide.memory.tracing.python_places import PythonStatePlaces
from lowtide.streaming.capture.model_inputs import ModelInputs
from lowtide.streaming.capture.outputs import largest_error

_WATCHED = bool, int, float, str, tuple, list, type(None)


@contextmanager
def watch_writes(module: nn.Module) -> Iterator[set[AttributeKey]]:
    """Yield the plain attributes that a module and its parts set, those set as they were too.

    Many remember the size of their last input, which may be of this size already.
    """
    parts = {id(one) for one in module.modules()}
    written = set[AttributeKey]()
    own: Any = nn.Module.__setattr__

    def set_attribute(self: nn.Module, name: str, value: Any) -> None:
        if isinstance(value, _WATCHED) and id(self) in parts:
            written.add((id(self), name))
        own(self, name, value)

    nn.Module.__setattr__ = set_attribute
    try:
        yield written
    finally:
        nn.Module.__setattr__ = own


@contextmanager
def watch_first_reads(module: nn.Module) -> Iterator[set[AttributeKey]]:
    """Yield the attributes that a module and its parts read before they set them."""
    parts = {id(one) for one in module.modules()}
    written, read = set[AttributeKey](), set[AttributeKey]()
    own: Any = nn.Module.__setattr__
    get: Any = nn.Module.__getattribute__
    inherited = "__getattribute__" not in vars(nn.Module)

    def set_attribute(self: nn.Module, name: str, value: Any) -> None:
        written.add((id(self), name))
        own(self, name, value)

    def get_attribute(self: nn.Module, name: str) -> Any:
        key = id(self), name
        if key not in written and key[0] in parts:
            read.add(key)
        return get(self, name)

    nn.Module.__setattr__ = set_attribute
    nn.Module.__getattribute__ = get_attribute
    try:
        yield read
    finally:
        nn.Module.__setattr__, nn.Module.__getattribute__ = own, get
        if inherited:
            del nn.Module.__getattribute__


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
    places = PythonStatePlaces(module)
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


def _is_remembered(change: PlaceChange, read: set[AttributeKey]) -> bool:
    """Whether what one call wrote counts in the next.

    Of tensors that others replaced, anywhere but in an attribute, the results tell.
    """
    if change.owned:
        return change.attribute in read
    return not change.is_report and not are_alike(
        change.before, change.after, lambda one, other: one.shape == other.shape
    )
