"""Arguments of a model's call: streamed tensors with their axes, and fixed ones."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from lowtide.core.errors import ModelError, UsageError

# Dim that is streamed, of the first tensor or by position or name of the argument.
StreamAxis = int | Mapping[int | str, int]
_IMAGE_RANK, _IMAGE_AXIS = 4, 2
_AXIS_HINT = (
    "axis= names the dim to stream along for other inputs, such as axis=2 for T of (B, C, T)"
)
# Types of arguments whose repr is their value.
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
# Place of a tensor among the other arguments.
_TENSOR = object()


@dataclass(frozen=True)
class ModelInputs:
    """Arguments of one call, with the dim along which each streamed tensor is split.

    Dim 0 is the batch, unless a tensor is streamed along it. Tensors that are not streamed are
    fixed: every band takes them whole.

    Attributes:
        tensors: Every tensor of the arguments, in order.
        axes: By position in ``tensors`` the streamed dim.
        others: All arguments, flat, with a marker in place of each tensor.
        spec: Nesting of the arguments; None for tensors alone.
    """

    tensors: tuple[Tensor, ...]
    axes: Mapping[int, int]
    others: tuple[Any, ...] = ()
    spec: TreeSpec | None = None

    @classmethod
    def bind(
        cls,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        axis: StreamAxis | None = None,
    ) -> ModelInputs:
        """Return the arguments of ``module(*args, **kwargs)`` with their axes.

        Args:
            module: Module to call.
            args: Positional arguments.
            kwargs: Keyword arguments.
            axis: Dim of the first tensor, or of each streamed argument by position or name; by
                default the height of an image (B, C, H, W).

        Raises:
            UsageError: An argument cannot be streamed along this axis.
        """
        arguments = {**dict(enumerate(args)), **kwargs}
        if isinstance(axis, Mapping):
            chosen = {_find_argument(module, arguments, key): dim for key, dim in axis.items()}
        else:
            first = next((key for key, one in arguments.items() if isinstance(one, Tensor)), None)
            chosen = {first: axis}
        axes, position = dict[int, int](), 0
        for key, value in arguments.items():
            if key in chosen:
                axes[position] = _checked_axis(value, chosen[key])
            position += sum(isinstance(leaf, Tensor) for leaf in tree_leaves(value))
        if not axes:
            raise UsageError(
                "streaming takes a tensor, and none is among the arguments",
                hint="pass the image as an argument of its own, not in a list or dictionary",
            )
        leaves, spec = tree_flatten((args, dict(kwargs)))
        tensors = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
        others = tuple(_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        for one in others:
            if one is not _TENSOR and not isinstance(one, _PLAIN):
                raise UsageError(
                    "a streamed module takes tensors, numbers and strings, not an object of type"
                    f" {type(one).__name__}"
                )
        made = cls(tensors, axes, others, spec)
        if made.batched and len({len(one) for one in made.streamed}) > 1:
            raise UsageError("the streamed tensors differ in batch size")
        return made

    @classmethod
    def of(cls, inputs: Tensor | ModelInputs) -> ModelInputs:
        """Return ``inputs``; for an image (B, C, H, W) those of a call with it alone."""
        return inputs if isinstance(inputs, ModelInputs) else cls((inputs,), {0: _IMAGE_AXIS})

    @property
    def streamed(self) -> list[Tensor]:
        """Tensors that are split into bands, such as (B, C, H, W)."""
        return [self.tensors[position] for position in self.axes]

    @property
    def fixed(self) -> list[Tensor]:
        """Tensors that every band takes whole, such as a timestep (B,)."""
        return [one for position, one in enumerate(self.tensors) if position not in self.axes]

    @property
    def first(self) -> Tensor:
        """The first streamed tensor, such as (B, C, H, W).

        Its device and dtype are those of the run.
        """
        return self.streamed[0]

    @property
    def axis(self) -> int:
        """Streamed dim of the first streamed tensor."""
        return next(iter(self.axes.values()))

    @property
    def batched(self) -> bool:
        """Whether dim 0 of the streamed tensors is the batch."""
        return 0 not in self.axes.values()

    @property
    def batch_size(self) -> int:
        """Number of samples."""
        return len(self.first) if self.batched else 1

    @property
    def key(self) -> object:
        """All that a captured graph depends on, for one sample."""
        one = self.sample(0)
        facts = ((tuple(it.shape), it.dtype, it.device, memory_format_of(it)) for it in one.tensors)
        return (*facts, *self.axes.items(), *self.arguments)

    @property
    def arguments(self) -> tuple[str, ...]:
        """Arguments that are no tensors, and the nesting of all."""
        return (*(repr(one) for one in self.others if one is not _TENSOR), repr(self.spec))

    def call(self, module: Callable[..., Any], tensors: Sequence[Tensor] | None = None) -> Any:
        """Call ``module``, with other ``tensors``, of any shape, in place of these if given."""
        given = iter(self.tensors if tensors is None else tensors)
        if self.spec is None:
            return module(*given)
        leaves = [next(given) if one is _TENSOR else one for one in self.others]
        args, kwargs = tree_unflatten(leaves, self.spec)
        return module(*args, **kwargs)

    def with_tensors(self, tensors: Sequence[Tensor]) -> ModelInputs:
        """Return the same call with other tensors, of any shape."""
        return replace(self, tensors=tuple(tensors))

    def with_streamed(self, tensors: Sequence[Tensor]) -> ModelInputs:
        """Return the same call with other streamed tensors, such as (B, C, H, W)."""
        changed = dict(zip(self.axes, tensors, strict=True))
        return self.with_tensors([changed.get(at, one) for at, one in enumerate(self.tensors)])

    def has_batch(self, tensor: Tensor) -> bool:
        """Whether dim 0 of a tensor (B, ...) is the batch, of several samples."""
        return 1 < self.batch_size == (len(tensor) if tensor.dim() else 0)

    def sample(self, index: int) -> ModelInputs:
        """Return the call for one sample; fixed tensors without the batch stay whole."""
        return self.with_tensors(
            [one[index : index + 1] if self.has_batch(one) else one for one in self.tensors]
        )

    def samples(self) -> Iterator[ModelInputs]:
        """Yield the call for each sample of the batch."""
        return map(self.sample, range(self.batch_size))

    def side_dims(self) -> list[int]:
        """Return the dims of the first streamed tensor that a smaller example shortens."""
        return side_dims(self.first.dim(), self.axis)

    def resized(self, sides: Mapping[int, int]) -> ModelInputs:
        """Return the call with random streamed tensors of another size.

        Their values are in 0..1, or those of the tensor itself where they are whole numbers, which
        may name classes.

        Args:
            sides: New sizes of dims of the first streamed tensor. The others keep their
                proportions to it, dims counted from the streamed one.
        """
        generator, made = torch.Generator().manual_seed(0), []
        for tensor, axis in zip(self.streamed, self.axes.values(), strict=True):
            shape = list(tensor.shape)
            for dim, size in sides.items():
                at = dim - self.axis + axis
                if 0 <= at < len(shape):
                    shape[at] = shape[at] * size // self.first.shape[dim]
            if tensor.is_floating_point():
                values = torch.rand(shape, generator=generator).to(tensor.device, tensor.dtype)
            else:
                places = torch.randint(tensor.numel(), shape, generator=generator)
                values = tensor.flatten()[places.to(tensor.device)]
            made.append(values.contiguous(memory_format=memory_format_of(tensor)))
        return self.with_streamed(made)


def side_dims(rank: int, axis: int) -> list[int]:
    """Return the dims of a tensor streamed along ``axis`` that a smaller example shortens.

    These are the streamed dim and all after the channels, as in (B, C, D, H, W) or, streamed along
    dim 1, (B, T, C, H, W).
    """
    first = 2 if axis >= 2 else axis + 2 if rank - axis >= _IMAGE_RANK else rank
    return sorted({axis, *range(first, rank)})


def memory_format_of(tensor: Tensor) -> torch.memory_format:
    """Return the memory format of a tensor, which decides the copies a model makes.

    Contiguous or, for (B, C, H, W) and (B, C, D, H, W), channels-last.
    """
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    if last is None or tensor.is_contiguous() or not tensor.is_contiguous(memory_format=last):
        return torch.contiguous_format
    return last


def _find_argument(
    module: nn.Module, arguments: Mapping[int | str, Any], key: int | str
) -> int | str:
    """Return the key under which an argument was passed, by position or name."""
    if key in arguments:
        return key
    names = list(inspect.signature(module.forward).parameters)
    other = names.index(key) if key in names else None
    if isinstance(key, int):
        other = names[key] if key < len(names) else None
    if other is None or other not in arguments:
        raise UsageError(f"axis names the argument {key!r}, which is not passed")
    return other


def _checked_axis(value: Any, axis: int | None) -> int:
    """Return the axis of a streamed argument as a non-negative dim."""
    if not isinstance(value, Tensor):
        raise UsageError(f"only tensors are streamed, not {type(value).__name__}")
    shape = "×".join(map(str, value.shape)) or "()"
    if axis is None and value.dim() != _IMAGE_RANK:
        raise UsageError(
            f"streaming takes (batch, channels, height, width), not {shape}", hint=_AXIS_HINT
        )
    axis = _IMAGE_AXIS if axis is None else axis
    if 0 in value.shape:
        raise UsageError(f"streaming takes no empty tensor, and this one is {shape}")
    if not -value.dim() <= axis < value.dim():
        raise UsageError(f"a tensor of shape {shape} has no dim {axis} to stream along")
    if value.is_complex():
        raise UsageError(
            f"streaming takes real tensors, not {value.dtype}",
            hint="torch.view_as_real makes floating-point numbers of it",
        )
    return axis % value.dim()


def require_module(module: nn.Module) -> None:
    """Raise `UsageError` unless this is a module of Python code whose weights have shapes."""
    if not isinstance(module, nn.Module):
        raise UsageError(
            f"streaming takes a torch.nn.Module, not a {type(module).__name__}",
            hint="call the function in the forward of a module",
        )
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise UsageError(
                f"{_title(name)} is a TorchScript module, which has no Python code to capture",
                hint="stream the module that it was made from",
            )
        if any(map(is_lazy, part.parameters(recurse=False))):
            raise UsageError(
                f"{_title(name)} has no weights yet", hint="call the module once on an input"
            )


def require_plain_tensors(tensors: Iterable[Tensor]) -> None:
    """Raise `UsageError` unless all tensors of a call have values of their own."""
    for tensor in tensors:
        if problem := _problem(tensor):
            kind, hint = problem
            raise UsageError(f"streaming takes no {kind}", hint=hint)


def require_plain_weights(module: nn.Module) -> None:
    """Raise `ModelError` unless all weights of a module have values of their own."""
    for prefix, part in module.named_modules(remove_duplicate=False):
        for name, one in itertools.chain(part._parameters.items(), part._buffers.items()):
            if one is not None and (problem := _problem(one)):
                kind, hint = problem
                raise ModelError(f"{_joined(prefix, name)} of this model is a {kind}", hint=hint)
        for name, one in vars(part).items():
            if isinstance(one, torch.ScriptObject):
                raise ModelError(
                    f"{_joined(prefix, name)} of this model is packed for a quantized operator",
                    hint="take the model before it was quantized",
                )


def _problem(tensor: Tensor) -> tuple[str, str] | None:
    """Return (kind, hint) of a tensor whose values are not simply its own."""
    if tensor.is_meta or is_fake(tensor):
        kind = "meta" if tensor.is_meta else "fake"
        return f"{kind} tensor", "load values first; lowtide.estimate tells the memory without them"
    if tensor.is_nested or tensor.layout != torch.strided:
        return f"{'nested' if tensor.is_nested else 'sparse'} tensor", "make it dense first"
    if tensor.is_quantized:
        return "quantized tensor", "call its dequantize() first"
    if is_traceable_wrapper_subclass(tensor):
        kind = type(tensor).__name__
        return f"tensor of the type {kind}", "take it as it was before: not quantized, not sharded"
    return None


def _title(name: str) -> str:
    return name or "the model"


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
