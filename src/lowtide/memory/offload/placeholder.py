"""Placeholder parameter for a streamed weight that is not loaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_iter

from lowtide.core.errors import ModelError


def _getter(name: str) -> Any:
    return getattr(torch.Tensor, name).__get__


_PROPERTIES = """
    shape dtype layout ndim nbytes itemsize requires_grad is_leaf grad grad_fn is_sparse
    is_quantized is_nested
""".split()
# Metadata that may be read from a weight that is not loaded.
_METADATA = {
    torch.Tensor.size,
    torch.Tensor.stride,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.nelement,
    torch.Tensor.element_size,
    torch.Tensor.is_floating_point,
    torch.Tensor.is_complex,
    torch.Tensor.is_contiguous,
    torch.Tensor.__len__,
    *map(_getter, _PROPERTIES),
}
_DEVICE = _getter("device")
_DEVICE_KINDS = {_getter(f"is_{kind}"): kind for kind in ("cuda", "cpu", "meta")}


class WeightPlaceholder(nn.Parameter):
    """Parameter without values in place of a streamed weight that is not loaded.

    Shape, strides, dtype and device can be read; any other use raises `ModelError`.
    """

    weight_name: str
    weight_device: torch.device

    @classmethod
    def for_tensor(cls, name: str, tensor: torch.Tensor, device: torch.device) -> WeightPlaceholder:
        """Return a placeholder of the same shape as ``tensor``, on ``device``."""
        form = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        placeholder = torch.Tensor._make_subclass(cls, form, False)
        placeholder.weight_name, placeholder.weight_device = name, device
        return placeholder

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        placeholder = next(x for x in tree_iter((args, kwargs)) if isinstance(x, cls))
        if func == _DEVICE:
            return placeholder.weight_device
        if func in _DEVICE_KINDS:
            return placeholder.weight_device.type == _DEVICE_KINDS[func]
        if func in _METADATA:
            return super().__torch_function__(func, types, args, kwargs or {})
        raise ModelError(
            f"the streamed weight {placeholder.weight_name} was used while its block was not"
            " running",
            hint=f"keep it in memory: plan_offload(..., resident=[{placeholder.weight_name!r}])",
        )

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"WeightPlaceholder({self.weight_name})"
