"""Partition of a model's weights into blocks that are loaded together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from pydantic import BaseModel, ConfigDict
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from lowtide.core.errors import UsageError

# Kernels are chosen by alignment too: CUDA's allocator aligns to this, the CPU's to less.
ALIGNMENT = 512
# The largest module that is not split, as a fraction 1/n of all weights.
_MAX_BLOCK_FRACTION = 8
# Smaller neighbors share a block, up to this fraction 1/n of the largest.
_GROUP_FRACTION = 4

_CONTAINERS = (
    nn.Sequential,
    nn.ModuleList,
    nn.ModuleDict,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
)
# These read the weights of their submodules without calling them.
_UNSPLITTABLE = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


class WeightBlock(BaseModel):
    """Weights that are loaded together.

    ``tensors`` are the full names of parameters and buffers; ``modules`` are the modules that need
    them while they run. Without modules the block cannot be streamed: tied weights, those of a
    module that was split, those whose memory layout is not dense and strided, and what the caller
    wanted resident. ``nbytes`` is the block's size in a buffer, alignment included.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    modules: tuple[str, ...]
    tensors: tuple[str, ...]
    nbytes: int


@dataclass(frozen=True)
class TensorSlot:
    """One attribute of a module that holds a tensor of any shape; tied tensors have several."""

    name: str
    owner: nn.Module
    key: str
    tensor: torch.Tensor
    is_buffer: bool


def tensor_slots(model: nn.Module) -> Iterator[TensorSlot]:
    """Iterate over parameters and buffers; a module that occurs twice is visited once."""
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for is_buffer, store in ((False, module._parameters), (True, module._buffers)):
            for key, tensor in store.items():
                if tensor is not None:
                    yield TensorSlot(prefix + key, module, key, tensor, is_buffer)


def set_tensor(place: TensorSlot, tensor: torch.Tensor) -> None:
    """Replace the parameter or buffer of ``place`` by a tensor, often of the same shape."""
    if place.is_buffer:
        place.owner._buffers[place.key] = tensor
    else:
        # Not by its dictionary: recurrent layers keep lists of their weights, updated by setattr.
        setattr(place.owner, place.key, tensor)


def align_bytes(nbytes: int) -> int:
    """Round ``nbytes`` up to the alignment of a tensor in a buffer."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def memory_order(tensor: torch.Tensor) -> list[int]:
    """Return the dims of a tensor of any shape, slowest in memory first."""
    strides = tensor.stride()
    return sorted(range(tensor.dim()), key=lambda axis: (-strides[axis], axis))


def find_blocks(
    model: nn.Module,
    *,
    largest_bytes: int | None = None,
    split_layers: bool = False,
    resident: Iterable[str] = (),
) -> list[WeightBlock]:
    """Partition parameters and buffers into blocks, in the order of registration.

    Small neighbors are grouped. A tied tensor belongs to one block, under the first of its names.

    Args:
        largest_bytes: larger modules are split (an eighth of all weights by default): the model
            itself, and what is or contains a list of modules.
        split_layers: also split the layers in such lists, down to single modules.
        resident: names of tensors and modules that, with all their contents, are never streamed.

    Raises:
        UsageError: for a name in ``resident`` that the model does not have.
    """
    finder = _Finder(model, split_layers, tuple(resident))
    total = finder.streamable_bytes
    limit = total // _MAX_BLOCK_FRACTION if largest_bytes is None else largest_bytes
    blocks = _group_blocks(finder.split("", model, limit), limit // _GROUP_FRACTION)
    resident_blocks = [
        WeightBlock(name=place.name, modules=(), tensors=(place.name,), nbytes=nbytes)
        for place, nbytes in finder.resident
    ]
    return [*resident_blocks, *blocks]


class _Finder:
    """Separates tensors that may be streamed from those that may not, then splits."""

    def __init__(self, model: nn.Module, split_layers: bool, resident: tuple[str, ...]) -> None:
        self._model, self._split_layers = model, split_layers
        self.resident: list[tuple[TensorSlot, int]] = []
        self._own_tensors: dict[int, list[tuple[TensorSlot, int]]] = {}
        everything = list(tensor_slots(model))
        _check_names(model, everything, resident)
        storages = Counter(_storage_key(place.tensor) for place in everything)
        modules = Counter(id(part) for _, part in model.named_modules(remove_duplicate=False))
        # In a model on the meta device, real tensors are those that no file holds.
        has_meta = any(place.tensor.is_meta for place in everything)
        counted: set[object] = set()
        for place in everything:
            key = _storage_key(place.tensor)
            if key in counted:
                continue
            counted.add(key)
            if (
                storages[key] > 1
                or modules[id(place.owner)] > 1
                or not _is_dense(place.tensor)
                or (has_meta and not place.tensor.is_meta)
                or any(_is_inside(place.name, name) for name in resident)
            ):
                self.resident.append((place, _storage_bytes(place.tensor)))
            else:
                self._own_tensors.setdefault(id(place.owner), []).append(
                    (place, align_bytes(place.tensor.nbytes))
                )

    @property
    def streamable_bytes(self) -> int:
        """Bytes that may be streamed: those that no split has held back yet."""
        return sum(nbytes for found in self._own_tensors.values() for _, nbytes in found)

    def split(self, path: str, module: nn.Module, limit: int) -> list[WeightBlock]:
        """Return the blocks of one module and its submodules."""
        found = [item for part in module.modules() for item in self._own_tensors.get(id(part), ())]
        nbytes = sum(size for _, size in found)
        if not nbytes:
            return []
        if _is_callable(module) and (nbytes <= limit or not self._can_split(module)):
            names = tuple(place.name for place, _ in found)
            return [WeightBlock(name=path, modules=(path,), tensors=names, nbytes=nbytes)]
        # Its own weights are used while its submodules run, each with its block.
        self.resident += self._own_tensors.pop(id(module), [])
        blocks = []
        for key, child in module.named_children():
            blocks += self.split(f"{path}.{key}" if path else key, child, limit)
        return blocks

    def _can_split(self, module: nn.Module) -> bool:
        if isinstance(module, _UNSPLITTABLE) or is_parametrized(module) or not [*module.children()]:
            return False
        if self._split_layers or module is self._model:
            return True
        return any(isinstance(part, _CONTAINERS) for part in module.modules())


def _is_callable(module: nn.Module) -> bool:
    """Return whether ``module`` has a forward (lists of modules have none)."""
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def _group_blocks(blocks: Sequence[WeightBlock], limit: int) -> list[WeightBlock]:
    groups: list[WeightBlock] = []
    for block in blocks:
        if groups and groups[-1].nbytes + block.nbytes <= limit:
            last = groups.pop()
            groups.append(
                WeightBlock(
                    name=f"{last.name.split(' … ')[0]} … {block.name}",
                    modules=last.modules + block.modules,
                    tensors=last.tensors + block.tensors,
                    nbytes=last.nbytes + block.nbytes,
                )
            )
        else:
            groups.append(block)
    return groups


def _is_inside(name: str, parent: str) -> bool:
    return name == parent or name.startswith(parent + ".")


def _check_names(model: nn.Module, known: Sequence[TensorSlot], resident: Iterable[str]) -> None:
    names = {place.name for place in known} | {path for path, _ in model.named_modules()}
    for name in resident:
        if name not in names:
            raise UsageError(f"the model has no module, parameter or buffer {name!r}")


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is just its bytes: dense, strided, and no subclass."""
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout != torch.strided:
        return False
    dense = tensor.detach().permute(memory_order(tensor)).is_contiguous()
    return dense and not tensor.is_quantized


def _storage_key(tensor: torch.Tensor) -> object:
    """Return a key equal for tensors that share memory, on any device.

    On meta no tensor has an address, so the storage's identity is used.
    """
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout != torch.strided:
        return id(tensor)
    return "storage", tensor.untyped_storage()._cdata


def _storage_bytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes() if _is_dense(tensor) else tensor.nbytes
