"""Stand-ins for the objects that a checkpoint's pickle names.

Tensors become references to their storages, dictionaries become dict, and harmless objects are
opaque.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

_MOST_SIDES, _MOST_ARGUMENTS, _MOST_COPIED = 64, 16, 500_000
_LARGEST_SIDE, _LARGEST_KEY = 1 << 48, 1 << 31
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "UntypedStorage": torch.uint8,
}
# Objects of these hold no weights and are ignored.
_HARMLESS = {
    "_codecs": "encode",
    "argparse": "Namespace",
    "builtins": "bool bytearray bytes complex dict float frozenset int list range set slice str "
    "tuple",
    "collections": "deque",
    "datetime": "date datetime timedelta timezone",
    "numpy": "dtype ndarray bool_ float16 float32 float64 int8 int16 int32 int64 uint8",
    "numpy.core.multiarray": "scalar _reconstruct",
    "numpy.core.numeric": "_frombuffer",
    "pathlib": "Path PosixPath PurePath PurePosixPath PureWindowsPath WindowsPath",
    "torch": "Size Tensor device",
    "torch._tensor": "Tensor",
    # Quantized or sparse tensors, such as optimizers keep: no network here is stored in them.
    "torch._utils": "_rebuild_tensor_v3 _rebuild_qtensor _rebuild_sparse_tensor",
    "torch.serialization": "_get_layout",
    "types": "SimpleNamespace",
    "uuid": "UUID",
}
_DICTIONARIES = {
    "collections": "Counter OrderedDict defaultdict",
    "typing": "OrderedDict",
    "lightning.fabric.utilities.data": "AttributeDict",
    "lightning_fabric.utilities.data": "AttributeDict",
    "pytorch_lightning.utilities.parsing": "AttributeDict",
}
_TENSORS = {
    "torch._utils": "_rebuild_tensor _rebuild_tensor_v2 _rebuild_parameter "
    "_rebuild_parameter_with_state",
    "torch._tensor": "_rebuild_from_type_v2",
    "torch.nn.parameter": "Parameter",
}
# Module names in pickles of other versions of Python and NumPy.
_RENAMED = {
    "__builtin__": "builtins",
    "numpy._core.multiarray": "numpy.core.multiarray",
    "numpy._core.numeric": "numpy.core.numeric",
}


class DamagedCheckpointError(ValueError):
    """The stream was not written by torch.save, or is damaged."""


class ForbiddenNameError(ValueError):
    """The pickle imports ``name``, which is not on the allowlists of this module."""

    def __init__(self, name: str) -> None:
        super().__init__(f"it imports {name}")
        self.name = name


@dataclass(frozen=True)
class StorageRef:
    """Reference to a typed storage of the file by key, or to a view of it.

    ``numel`` and ``offset``, the offset of a view, are in elements.
    """

    key: str
    dtype: torch.dtype
    numel: int
    offset: int = 0


@dataclass(frozen=True)
class TensorRef:
    """Reference to a strided view of a storage; offset and strides are in elements.

    Raises `DamagedCheckpointError` for one that reaches beyond its storage.
    """

    storage: StorageRef
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.size) != len(self.stride) or len(self.size) > _MOST_SIDES:
            raise DamagedCheckpointError(
                f"a tensor has {len(self.size)} dimensions, {len(self.stride)} strides"
            )
        sides = (self.offset, *self.size, *self.stride)
        if not all(type(side) is int and 0 <= side < _LARGEST_SIDE for side in sides):
            raise DamagedCheckpointError(
                "a tensor has a size, stride or offset that is no valid count"
            )
        last = sum((side - 1) * step for side, step in zip(self.size, self.stride, strict=True))
        end = 0 if 0 in self.size else self.offset + last + 1
        if end > self.storage.offset + self.storage.numel:
            raise DamagedCheckpointError("a tensor extends beyond its storage")


@dataclass(frozen=True)
class OpaqueObject:
    """Stand-in for a harmless name, or for an object of it."""

    name: str


class PickleObjectFactory:
    """Factory of one file's objects, which collects its ``storages`` by key."""

    def __init__(self) -> None:
        self.storages: dict[str, StorageRef] = {}
        self._copied = 0

    def resolve_name(self, module: Any, name: Any) -> OpaqueObject:
        """Resolve a global name; raises `ForbiddenNameError` unless it is allowed."""
        module = _RENAMED.get(module, module)
        listed = any(
            name in table.get(module, "").split() for table in (_HARMLESS, _DICTIONARIES, _TENSORS)
        )
        if not listed and not _is_torch_value(module, name):
            raise ForbiddenNameError(f"{module}.{name}")
        return OpaqueObject(f"{module}.{name}")

    def build(self, function: Any, arguments: Any) -> Any:
        """Build the object of a call of a name; raises `DamagedCheckpointError`."""
        if type(function) is not OpaqueObject or type(arguments) is not tuple:
            raise DamagedCheckpointError("it calls an object that is not a name")
        module, _, name = function.name.rpartition(".")
        if name in _DICTIONARIES.get(module, "").split():
            return self._dictionary(arguments)
        if name not in _TENSORS.get(module, "").split():
            return function  # a harmless object
        if len(arguments) > _MOST_ARGUMENTS:
            raise DamagedCheckpointError(f"{function.name} has {len(arguments)} arguments")
        if name == "_rebuild_from_type_v2":  # (function, type, arguments, state)
            if arguments[0] == function:
                raise DamagedCheckpointError("a tensor is rebuilt by a function that makes none")
            return self.build(arguments[0], arguments[2])
        return _tensor(*arguments) if name.startswith("_rebuild_tensor") else arguments[0]

    def resolve_storage(self, persistent_id: Any) -> StorageRef:
        """Resolve a persistent ID of torch.save to a storage; raises `DamagedCheckpointError`."""
        if type(persistent_id) is not tuple or not 5 <= len(persistent_id) <= 6:
            raise DamagedCheckpointError("it refers to a storage in an unknown way")
        what, kind, key, _, count, *views = persistent_id
        dtype = _STORAGES.get(kind.name.rpartition(".")[2])
        if what not in ("storage", b"storage") or dtype is None or type(key) not in (str, int):
            raise DamagedCheckpointError("it refers to a storage of an unknown kind")
        if type(count) is not int or count < 0:
            raise DamagedCheckpointError("it refers to a storage without a valid size")
        found = self.storages.setdefault(str(key), StorageRef(str(key), dtype, count))
        if (found.dtype, found.numel) != (dtype, count):
            if found.numel or count:
                raise DamagedCheckpointError("it refers to one storage with two dtypes or sizes")
            found = StorageRef(str(key), dtype, 0)
        return _view(found, views[0]) if views and views[0] is not None else found

    def _dictionary(self, given: tuple[Any, ...]) -> dict[Any, Any]:
        """Build a dict from pairs, as Python 2 wrote it; other arguments are ignored."""
        pairs = given[0] if len(given) == 1 and type(given[0]) is list else []
        # Limited, since a few bytes of pickle can copy one list again.
        self._copied += len(pairs)
        if self._copied > _MOST_COPIED:
            raise DamagedCheckpointError("it copies its lists too often")
        return {plain_key(key): value for key, value in pairs}


def plain_key(key: Any) -> Any:
    """Return ``key`` if it is a safe dictionary key; raises `DamagedCheckpointError` otherwise.

    Safe keys hash in constant time and rarely collide.
    """
    parts = key if type(key) is tuple and len(key) <= _MOST_ARGUMENTS else (key,)
    for part in parts:
        small = type(part) is int and abs(part) < _LARGEST_KEY
        if not small and type(part) not in (str, bytes, bool, type(None), OpaqueObject):
            raise DamagedCheckpointError(
                "a dictionary has a key that is neither a name nor a small integer"
            )
    return key


def _view(whole: StorageRef, view: Any) -> StorageRef:
    _, first, count = view
    if type(first) is not int or type(count) is not int or first < 0 or count < 0:
        raise DamagedCheckpointError("a view of a storage has no valid size")
    if first + count > whole.numel:
        raise DamagedCheckpointError("a view extends beyond its storage")
    return StorageRef(whole.key, whole.dtype, count, first)


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> TensorRef:
    """Stand-in for `torch._utils._rebuild_tensor` and its second version.

    Gradients and hooks are ignored.
    """
    if type(storage) is not StorageRef:
        raise DamagedCheckpointError("a tensor has no storage")
    if type(size) is not tuple or type(stride) is not tuple or type(offset) is not int:
        raise DamagedCheckpointError("a tensor has no valid size")
    if rest[2:] and rest[2]:
        raise DamagedCheckpointError("a tensor is a conjugate or a negative of what is stored")
    return TensorRef(storage, storage.offset + offset, size, stride)


def _is_torch_value(module: str, name: str) -> bool:
    """Return whether a name is a storage type, a dtype or a layout, never called."""
    if module == "torch" and name not in _STORAGES:
        # vars(), since getattr might import an attribute on demand.
        return isinstance(vars(torch).get(name), (torch.dtype, torch.layout))
    return module in ("torch", "torch.cuda", "torch.storage") and name in _STORAGES
