"""Resident weights of a streamed model: loading, moving to the device, restoring."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import nn

from lowtide.core.errors import ModelError
from lowtide.memory.offload.buffers import BufferLayout
from lowtide.memory.offload.weight_blocks import TensorSlot, set_tensor, tensor_slots
from lowtide.memory.offload.weight_files import WeightFiles

# By the id of a tensor: its name in the files, and all its slots in the model.
_Named = dict[int, tuple[str, list[TensorSlot]]]


def match_files(model: nn.Module, files: WeightFiles) -> _Named:
    """Match each meta tensor of the model to its name in ``files``.

    Raises:
        ModelError: for tensors that are missing or of another shape.
    """
    groups: dict[int, list[TensorSlot]] = {}
    for place in tensor_slots(model):
        if place.tensor.is_meta:
            groups.setdefault(id(place.tensor), []).append(place)
    named, missing = {}, []
    for key, group in groups.items():
        # Checkpoints keep one of the names of a tied weight, and not always the same one.
        name = next((place.name for place in group if place.name in files), None)
        if name is None:
            missing.append(group[0].name)
        elif files.shape(name) != tuple(group[0].tensor.shape):
            raise ModelError(
                f"{name} is {files.shape(name)} in the file, {tuple(group[0].tensor.shape)} in"
                " the model",
                hint="the file belongs to another model or configuration",
            )
        else:
            named[key] = (name, group)
    if missing:
        some = ", ".join(missing[:3]) + (" …" if missing[3:] else "")
        raise ModelError(
            f"{len(missing)} tensors of the model are not in the file: {some}",
            hint="pass all parts of the checkpoint; set tensors that are in none before streaming",
        )
    return named


def load_resident(
    layouts: Sequence[BufferLayout],
    files: WeightFiles,
    named: _Named,
    device: torch.device,
    undo: ExitStack,
) -> None:
    """Load the weights that the plan does not stream from ``files`` to ``device``.

    ``undo`` gets callbacks that put the meta tensors back.
    """
    streamed = {id(place.tensor) for layout in layouts for place in layout.places}
    for key, (name, group) in named.items():
        if key in streamed:
            continue
        empty = group[0].tensor
        tensor = torch.empty_strided(empty.shape, empty.stride(), dtype=empty.dtype)
        files.read(name, tensor)
        tensor = tensor.to(device)
        if isinstance(empty, nn.Parameter):
            tensor = nn.Parameter(tensor, requires_grad=empty.requires_grad)
        for place in group:
            undo.callback(set_tensor, place, empty)
            set_tensor(place, tensor)


def move_resident(
    model: nn.Module, layouts: Sequence[BufferLayout], device: torch.device, undo: ExitStack
) -> None:
    """Move tensors that are not streamed to ``device``; shared storages stay shared.

    ``undo`` gets callbacks that move them back.
    """
    seen = {id(place.tensor) for layout in layouts for place in layout.places}
    moved: dict[int, torch.UntypedStorage] = {}
    for place in tensor_slots(model):
        tensor = place.tensor
        if id(tensor) in seen or tensor.device == device:
            continue
        seen.add(id(tensor))
        before = tensor.data
        undo.callback(_restore, tensor, before)
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout != torch.strided:
            tensor.data = before.to(device)
            continue
        storage = tensor.untyped_storage()
        if storage._cdata not in moved:
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            moved[storage._cdata] = flat.to(device).untyped_storage()
        tensor.data = torch.empty(0, dtype=tensor.dtype, device=device).set_(
            moved[storage._cdata], tensor.storage_offset(), tensor.shape, tensor.stride()
        )


def _restore(tensor: torch.Tensor, before: torch.Tensor) -> None:
    """Restore ``before`` as the data of ``tensor``, keeping the run's changes.

    Counters, for example, change in a run.
    """
    before.copy_(tensor.data)
    tensor.data = before
