"""Fake-tensor twins of models and inputs, without data, and a cache of operator calls on them.

The cache is keyed by shapes, strides and types. Why: a training step of a transformer makes ten
thousand calls of a few hundred kinds. PyTorch takes 0.1 ms for each, most of it to look up an
answer that it already has.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import warnings
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from lowtide.core.trace_cache import value_cache
from lowtide.memory.tracing.fake_fixes import fix_fake_result
from lowtide.memory.tracing.steps import TraceableStep, TrainingStep
from lowtide.memory.tracing.trace import DEVICE_QUERY, Call

_CPU = torch.device("cpu")
_KEY_TYPES = (
    int,
    float,
    bool,
    str,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)


class _NewResult(NamedTuple):
    """Layout of a result with its own storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class _ViewResult(NamedTuple):
    """Layout of a result that is a view of the first argument's storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int


class _Unknown(Exception):  # noqa: N818 - says that a call must be made, not that one failed
    """Raised for a call or result that sizes, strides and types do not describe."""


_SELF = object()


class FakeCallCache:
    """Cached operator calls on tensors of one `FakeTensorMode`.

    The results are those of the mode, with `fix_fake_result` applied. They are cached by the
    arguments' sizes, strides, types and scalar values. Operators that write are called each time,
    except those that would change values only. A device argument is replaced by the CPU, where all
    twins are.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._entries: dict[Hashable, Any] = {}

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of ``func(*args, **kwargs)``.

        Views share the storage of their base.
        """
        if func is DEVICE_QUERY and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        args, kwargs = _on_cpu(args, kwargs)
        # Fake scalars have tracked values (an optimizer counts its steps in one).
        if _only_writes_values(func) and isinstance(args[0], FakeTensor) and args[0].dim() > 0:
            return args[0]
        key = None if func._schema.is_mutable else _key(func, args, kwargs)
        known = None if key is None else self._entries.get(key)
        if known is not None and known is not _Unknown:
            return self._rebuild(known, args)
        result = fix_fake_result(func, args, func(*args, **kwargs))
        if key is not None and known is None:
            self._entries[key] = self._describe_or_unknown(args, result)
        return result

    def _describe_or_unknown(self, args: Sequence[Any], result: Any) -> Any:
        try:
            return self._describe(args, result)
        except _Unknown:
            return _Unknown

    def _describe(self, args: Sequence[Any], result: Any) -> Any:
        if isinstance(result, list | tuple):
            return [type(result), *(self._describe(args, part) for part in result)]
        if not isinstance(result, FakeTensor) or not _is_plain(result):
            raise _Unknown
        first = args[0] if args else None
        if result is first:
            return _SELF
        shape, stride, dtype = tuple(result.shape), result.stride(), result.dtype
        if isinstance(first, FakeTensor) and _storage(result) == _storage(first):
            return _ViewResult(shape, stride, dtype, int(result.storage_offset()))
        facts = _NewResult(shape, stride, dtype)
        rebuilt = self._rebuild(facts, args)
        if rebuilt.untyped_storage().nbytes() != result.untyped_storage().nbytes():
            raise _Unknown  # a view of another argument, or of a larger storage
        if any(_storage(result) == _storage(arg) for arg in args if isinstance(arg, FakeTensor)):
            raise _Unknown
        return facts

    def _rebuild(self, known: Any, args: Sequence[Any]) -> Any:
        if known is _SELF:
            return args[0]
        if isinstance(known, list):
            return known[0](self._rebuild(part, args) for part in known[1:])
        if isinstance(known, _ViewResult):
            if not torch.is_inference_mode_enabled() or args[0].is_inference():
                return self._view(known, args[0].untyped_storage())
            with torch.inference_mode(False):  # a view of a weight must stay an ordinary tensor
                return self._view(known, args[0].untyped_storage())
        with _DisableDispatch():
            bare = torch.empty_strided(known.shape, known.stride, dtype=known.dtype, device="meta")
        return FakeTensor(self._mode, bare, _CPU)

    def _view(self, known: _ViewResult, storage: Any) -> FakeTensor:
        with _DisableDispatch():
            bare = torch.empty((0,), dtype=known.dtype, device="meta")
            bare.set_(storage, known.offset, known.shape, known.stride)
        return FakeTensor(self._mode, bare, _CPU)


# Bypasses all dispatch modes: they must not see the fake tensors made inside.
_DisableDispatch = torch._C._DisableTorchDispatch


class CachedFakeCallsMode(TorchDispatchMode):
    """Dispatch mode that sends operators to a `FakeCallCache` and records nothing."""

    def __init__(self, calls: Call) -> None:
        super().__init__()
        self._calls = calls

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self._calls(func, args, kwargs or {})


def _on_cpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
    """Replace device arguments by the CPU.

    Graphs captured on a GPU name it, as do models that create their masks there.
    """
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": _CPU}
    if any(isinstance(value, torch.device) for value in args):
        args = tuple(_CPU if isinstance(value, torch.device) else value for value in args)
    return args, kwargs


def _key(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable | None:
    """Return the cache key of a call; None where arguments cannot be part of a key."""
    # Some operators keep more for a backward pass where gradients are enabled.
    parts: list[Hashable] = [func, torch.is_grad_enabled()]
    try:
        for value in args:
            _add_key_parts(parts, value)
        for name, value in kwargs.items():
            parts.append(name)
            _add_key_parts(parts, value)
    except _Unknown:
        return None
    return tuple(parts)


def _add_key_parts(parts: list[Hashable], value: Any) -> None:
    if isinstance(value, FakeTensor):
        # A 0-d tensor has lower priority in type promotion.
        if not _is_plain(value) or value.dim() == 0:
            raise _Unknown
        parts += (value.shape, value.stride(), value.storage_offset(), value.dtype)
    elif type(value) in _KEY_TYPES:
        parts += (type(value), value)  # 1, 1.0 and True are the same key
    elif isinstance(value, list | tuple):
        parts.append(len(value))
        for part in value:
            _add_key_parts(parts, part)
    else:
        raise _Unknown


def _is_plain(tensor: FakeTensor) -> bool:
    return (
        tensor.fake_device == _CPU
        and tensor.constant is None
        and tensor.layout is torch.strided
        and not tensor.dtype.is_complex
    )


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


_REWRITES = frozenset({torch.ops.aten.copy_, torch.ops.aten.zero_, torch.ops.aten.fill_})


@functools.cache
def _only_writes_values(func: Any) -> bool:
    """Return whether an operator only rewrites the values of its first argument.

    A fake argument does not change then.
    """
    arguments = func._schema.arguments
    written = [one.name for one in arguments if one.alias_info and one.alias_info.is_write]
    return (
        (torch.Tag.pointwise in func.tags or func.overloadpacket in _REWRITES)
        and written == ["self"]
        and func.__name__.split(".")[0].endswith("_")
    )


M = TypeVar("M", bound=nn.Module)
S = TypeVar("S", bound=TraceableStep)


class FakeModelConverter:
    """Converter of models and inputs to fake CPU tensors, and the mode they run in.

    Tensors that share a storage also share it as twins. The originals may be on any device,
    ``meta`` included, and are not changed.

    Attributes:
        calls: `FakeCallCache` that calls operators on the twins.
        mode: The mode of the twins.

    Args:
        dtype: Type of the twins of floating-point tensors; by default that of the originals.
        keeps_weights: Whether further copies of a model share the twins of its tensors, which must
            stay the same meanwhile.
    """

    def __init__(self, dtype: torch.dtype | None = None, *, keeps_weights: bool = False) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.calls = FakeCallCache(self.mode)
        self._dtype = dtype
        self._storages: dict[tuple[int, torch.dtype], Tensor] = {}
        self._keeps_weights = keeps_weights
        # By model, the twins of its tensors.
        self._weights: dict[int, dict[int, Any]] = {}

    @contextmanager
    def fake_mode(self) -> Iterator[None]:
        """Context in which new tensors are fake.

        Real tensors that operators meet inside (constants) are converted.
        """
        # Only the model and the step keep the twins from here on, so that replaced ones are freed.
        self._storages.clear()
        with self.mode, value_cache(), warnings.catch_warnings():
            # Fake copies of constants raise warnings that only matter to compilers.
            warnings.simplefilter("ignore")
            yield

    def model(self, model: M) -> M:
        """Return a copy of ``model`` with fake tensors only."""
        known = self._weights.get(id(model)) or self._weight_twins(model)
        if self._keeps_weights:
            self._weights[id(model)] = known
        return copy.deepcopy(model, dict(known))

    def _weight_twins(self, model: nn.Module) -> dict[int, Any]:
        made: dict[int, Any] = {}
        for tensor in model_tensors(model):
            fake = self._twin(tensor)
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
            made[id(tensor)] = fake
        return made

    def tree(self, tree: Any) -> Any:
        """Return ``tree`` (nested tuples, lists, dicts) with fake tensors."""
        return tree_map_only(Tensor, self._input, tree)

    def step(self, step: S) -> S:
        """Return ``step`` with fake inputs."""
        changed: dict[str, Any] = {
            "inputs": self.tree(step.inputs),
            "keywords": self.tree(dict(step.keywords)),
        }
        if isinstance(step, TrainingStep):
            changed["validation"] = self.tree(step.validation)
        return dataclasses.replace(cast(Any, step), **changed)

    def _input(self, tensor: Tensor) -> Tensor:
        return self._twin(tensor).requires_grad_(tensor.requires_grad)

    def _twin(self, tensor: Tensor) -> Tensor:
        dtype = tensor.dtype
        if self._dtype is not None and tensor.is_floating_point():
            dtype = self._dtype
        storage = tensor.untyped_storage()
        key = storage._cdata, dtype
        with self.mode:
            if key not in self._storages:
                count = storage.nbytes() // tensor.element_size()
                self._storages[key] = torch.empty(count, dtype=dtype, device="cpu")
            # Strides are kept: the memory format decides what convolutions allocate.
            return torch.as_strided(
                self._storages[key], tensor.shape, tensor.stride(), tensor.storage_offset()
            )


def clear_shape_caches() -> None:
    """Clear PyTorch's caches of traced operators and shapes.

    They hold tens of MiB for a large model, which only further traces would use.
    """
    FakeTensorMode.cache_clear()


def model_tensors(model: nn.Module) -> list[Tensor]:
    """Return every tensor of a model: parameters, buffers and plain attributes.

    Each once, of any shape.
    """
    found: dict[int, Tensor] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        found[id(tensor)] = tensor
    for module in model.modules():
        plain = {
            name: value
            for name, value in vars(module).items()
            if name not in ("_parameters", "_buffers", "_modules")
        }
        for value in tree_flatten(plain)[0]:
            if isinstance(value, Tensor):
                found.setdefault(id(value), value)
    return list(found.values())
