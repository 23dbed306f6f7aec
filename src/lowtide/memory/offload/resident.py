"""Weights that stay: loaded once, on the device where the model runs, and brought back after."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import nn

from lowtide.core.errors import ModelError
from lowtide.memory.offload.buffers import BufferLayout
from lowtide.memory.offload.weight_blocks import TensorSlot, set_tensor, tensor_slots
from lowtide.memory.offload.weight_files import WeightFiles

# For each tensor, by its id: its name in the files, and all its places in the model.
_Named = dict[int, tuple[str, list[TensorSlot]]]


def find_in_files(model: nn.Module, files: WeightFiles) -> _Named:
    """Where in ``files`` each tensor of the model is that has no memory yet.

    Raises `ModelError` for tensors that are missing or of another shape.
    """
    groups: dict[int, list[TensorSlot]] = {}
    for place in tensor_slots(model):
        if place.tensor.is_meta:
            groups.setdefault(id(place.tensor), []).append(place)
    named, missing = {}, []
    for key, group in groups.items():
        # Checkpoints keep one of the names of a tied weight, and not all the same one.
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
            hint="give all parts of the checkpoint; set what is in none before streaming",
        )
    return named


def load_resident(
    layouts: Sequence[BufferLayout],
    files: WeightFiles,
    named: _Named,
    device: torch.device,
    undo: ExitStack,
) -> None:
    """Put real tensors where the plan streams none."""
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
    """Move what is not streamed to ``device``; what shares memory there shares it here too."""
    seen = {id(place.tensor) for layout in layouts for place in layout.places}
    moved: dict[int, torch.UntypedStorage] = {}
    for place in tensor_slots(model):
        tensor = place.tensor
        if id(tensor) in seen or tensor.device == device:
            continue
        seen.add(id(tensor))
        before = tensor.data
        undo.callback(_bring_back, tensor, before)
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


def _bring_back(tensor: torch.Tensor, before: torch.Tensor) -> None:
    """Put ``before`` back into ``tensor``, with what the run changed (counters, say)."""
    before.copy_(tensor.data)
    tensor.data = before
