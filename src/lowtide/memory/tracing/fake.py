"""Fake-tensor twins of models and inputs: sizes and strides without data."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_map_only

from lowtide.core.trace_cache import value_cache
from lowtide.memory.tracing.fake_calls import FakeCallCache
from lowtide.memory.tracing.steps import Traceable, TrainingStep

M = TypeVar("M", bound=nn.Module)
S = TypeVar("S", bound=Traceable)


class FakeTwins:
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
