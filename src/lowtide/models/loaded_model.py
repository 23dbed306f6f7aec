"""Model: an inference-ready module, whose equal buffers share memory, and its self-ensemble."""

from __future__ import annotations

from dataclasses import replace
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.core.errors import UsageError
from lowtide.models.descriptor import ModelDescriptor, SizeRule
from lowtide.models.low_precision import LowPrecisionWrapper, to_low_precision

# Side of the image that finds the order of a model's layers.
_PROBE_SIDE = 64

# Smaller buffers save nothing, and counters that training changes are among them.
_LEAST_BYTES = 64 << 10

_MIRRORS: tuple[tuple[int, ...], ...] = ((), (2,), (3,), (2, 3))


class Model:
    """Image-to-image model, ready to run.

    ``descriptor`` holds the facts. ``module`` is in eval mode without gradients; its forward takes
    (B, C, H, W) in 0..1 whose size already satisfies ``descriptor.size`` and returns
    (B, C', H * scale, W * scale), unclamped.
    """

    def __init__(self, module: nn.Module, descriptor: ModelDescriptor) -> None:
        self.module = module.eval().requires_grad_(False)
        self.descriptor = replace(
            descriptor, parameters=sum(parameter.numel() for parameter in module.parameters())
        )
        self._update_weight_bytes()

    def __repr__(self) -> str:
        facts = self.descriptor
        return f"<Model {facts.name}: {facts.architecture} x{facts.scale}, {self.dtype}>"

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(self.module.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of input images: the weights' own, or fp32 after `to_low_precision`."""
        if isinstance(self.module, LowPrecisionWrapper):
            return torch.float32
        return next(self.module.parameters()).dtype

    def __call__(self, image: Tensor) -> Tensor:
        """Run on a whole image of any size.

        Maps (B, C, H, W) in 0..1 to (B, C', H * scale, W * scale), clamped to 0..1. The image is
        padded as `pad_to_rule` does, and the padding's share of the result cut off. Equal to
        spandrel's own call, for models with linear layers or window attention up to rounding (2e-6
        for CRAFT). Raises UsageError for another number of dimensions or channels, an empty image,
        or a dtype or device that is not the model's.
        """
        self._check(image)
        height, width = image.shape[-2:]
        scale = self.descriptor.scale
        with torch.inference_mode():
            result = self.module(pad_to_rule(image, self.descriptor.size)).clamp_(0, 1)
        return result[..., : height * scale, : width * scale]

    def to(
        self,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        memory_format: torch.memory_format | None = None,
    ) -> Self:
        """Move or cast the weights in place; returns the model itself.

        Raises UsageError for a dtype the model does not support and for a device this machine does
        not have.
        """
        if dtype is not None:
            self._check_dtype(dtype)
        before = self.device
        if device is not None:
            self.module.to(device=require_device(device))
        if dtype is not None:
            self.module.to(dtype=dtype)
        if memory_format is not None:
            # nn.Module.to would also convert tensors of five axes, which cannot be channels-last.
            for tensor in (*self.module.parameters(), *self.module.buffers()):
                if tensor.dim() == 4:
                    tensor.data = tensor.data.contiguous(memory_format=memory_format)
        if dtype is not None or memory_format is not None or self.device != before:
            self._update_weight_bytes()
        return self

    def to_low_precision(self, dtype: torch.dtype) -> Self:
        """Compute in bf16 or fp16, in place, with fp32 input and output.

        See `to_low_precision`. Raises UsageError for a dtype the model does not support.
        """
        self._check_dtype(dtype)
        rows, columns = self.descriptor.size.padding(_PROBE_SIDE, _PROBE_SIDE)
        image = torch.full(
            (1, self.descriptor.in_channels, _PROBE_SIDE + rows, _PROBE_SIDE + columns),
            0.5,
            device=self.device,
        )
        self.module = to_low_precision(self.module, dtype, image).eval()
        self._update_weight_bytes()
        return self

    def _update_weight_bytes(self) -> None:
        """Share equal buffers and update the descriptor's ``weight_bytes``."""
        share_equal_buffers(self.module)
        self.descriptor = replace(self.descriptor, weight_bytes=weight_bytes(self.module))

    def _check_dtype(self, dtype: torch.dtype) -> None:
        name = str(dtype).removeprefix("torch.")
        if name not in self.descriptor.dtypes:
            raise UsageError(
                f"{self.descriptor.name} ({self.descriptor.architecture}) does not support {name}; "
                f"it supports {', '.join(self.descriptor.dtypes)}"
            )

    def _check(self, image: Tensor) -> None:
        channels = self.descriptor.in_channels
        if image.ndim != 4 or image.shape[1] != channels or 0 in image.shape:
            raise UsageError(
                f"{self.descriptor.name} takes images of shape (B, {channels}, H, W), "
                f"not {tuple(image.shape)}"
            )
        if image.dtype != self.dtype or image.device != self.device:
            raise UsageError(
                f"the image is {image.dtype} on {image.device}, "
                f"{self.descriptor.name} is {self.dtype} on {self.device}"
            )


def pad_to_rule(image: Tensor, rule: SizeRule) -> Tensor:
    """Pad (B, C, H, W) at the bottom and on the right until it satisfies ``rule``.

    Reflected as far as reflection reaches (one pixel less than the image), then the last row or
    column replicated; an image that needs no padding is returned unchanged.
    """
    height, width = image.shape[-2:]
    rows, columns = rule.padding(height, width)
    if not rows and not columns:
        return image
    mirrored_rows, mirrored_columns = min(rows, height - 1), min(columns, width - 1)
    image = F.pad(image, (0, mirrored_columns, 0, mirrored_rows), mode="reflect")
    rest = (0, columns - mirrored_columns, 0, rows - mirrored_rows)
    return F.pad(image, rest, mode="replicate")


def require_device(device: str | torch.device) -> torch.device:
    """Return the device if this machine has it; raises UsageError otherwise."""
    try:
        wanted = torch.device(device)
        backend = torch.get_device_module(wanted)
    except RuntimeError as error:
        raise UsageError(f"PyTorch does not know the device {device!r}") from error
    if not backend.is_available() or (wanted.index or 0) >= backend.device_count():
        raise UsageError(f"this machine has no device {str(wanted)!r}", hint="use the device 'cpu'")
    return wanted


def weight_bytes(module: nn.Module) -> int:
    """Return the bytes of parameters and buffers."""
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


@torch.no_grad()
def share_equal_buffers(module: nn.Module) -> None:
    """Let equal buffers of ``module``, which is not trained, share one tensor.

    Window transformers hold the position indices and the mask of shifted windows once per block:
    more than half of what a DRCT of 14 million parameters takes. Results are bit-identical. Moving
    or casting the module separates them again.
    """
    known: dict[object, list[Tensor]] = {}
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if type(buffer) is not Tensor or buffer.nbytes < _LEAST_BYTES or buffer.is_meta:
                continue
            alike = known.setdefault((buffer.dtype, buffer.device, buffer.shape), [])
            for other in alike:
                if other is buffer or _are_same(other, buffer):
                    part._buffers[name] = other
                    break
            else:
                alike.append(buffer)


def _are_same(one: Tensor, other: Tensor) -> bool:
    """Compare bits and strides: 0 and -0 differ, and a NaN is equal to itself."""
    if one.stride() != other.stride() or not one.is_contiguous():
        return False
    return torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8))


class SelfEnsemble(nn.Module):
    """Mean of ``body`` over the eight flips and transposes of an image (EDSR's "+").

    (B, C, H, W) becomes what ``body`` makes of it, at about eight times the time; results are
    accumulated one by one, so that it takes one more result in memory. Source: "geometric
    self-ensemble" of EDSR (Lim et al., arXiv 1707.02921).
    """

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, image: Tensor) -> Tensor:
        """Map (B, C, H, W) to the mean of ``body`` over its flips and transposes.

        The result has the shape that ``body`` gives it, such as (B, C, H * scale, W * scale).
        """
        total = self._sum_flips(image) + self._sum_flips(image.mT).mT
        return total / (2 * len(_MIRRORS))

    def _sum_flips(self, image: Tensor) -> Tensor:
        """Sum over the four flips, without a transpose."""
        total = self.body(image)
        for dims in _MIRRORS[1:]:
            total = total + self.body(image.flip(dims)).flip(dims)
        return total


def as_ensemble(model: ModelDescriptor) -> ModelDescriptor:
    """Return the model's descriptor with another SHA-256 for its self-ensemble.

    What was measured of the model alone does not hold for the ensemble.
    """
    return replace(model, sha256=f"{model.sha256}-self-ensemble")
