"""Networks that compute in bf16 or fp16 with fp32 input and output."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.models.optimized.narrow_conv import OptimizedNarrowConv, OptimizedTail
from lowtide.models.optimized.token_linear import OptimizedFirstConv, OptimizedPointwiseConv

# Layers with at most this many channels in and out map images to images.
_MAX_IMAGE_CHANNELS = 4
# Constructor arguments of a convolution.
_CONV_ARGUMENTS = """
    in_channels out_channels kernel_size stride padding dilation groups padding_mode
""".split()
# Bytes of a strip that EdgeConv converts at once.
_STRIP_BYTES = 16 << 20


class LowPrecisionWrapper(nn.Module):
    """Wrapper of a bf16 or fp16 ``body`` with fp32 input and output.

    ``input_dtype`` is the input dtype of the body: fp32 where its first and last convolution
    compute in fp32 (`to_low_precision`), else the low one, and ``reason`` says why.
    """

    def __init__(self, body: nn.Module, input_dtype: torch.dtype, reason: str = "") -> None:
        super().__init__()
        self.body, self.input_dtype, self.reason = body, input_dtype, reason

    def extra_repr(self) -> str:
        """Return the input dtype of the body."""
        return str(self.input_dtype)

    def forward(self, images: Tensor) -> Tensor:
        """Map fp32 (B, C, H, W) to the network's result in fp32."""
        return self.body(images.to(self.input_dtype)).float()


class Fp32EdgeConv(nn.Conv2d):
    """Conv2d that computes in fp32 from any input dtype and returns ``output_dtype``.

    Strips of rows are converted one after another: an fp32 copy of everything would be the memory
    peak of many networks.
    """

    output_dtype: torch.dtype

    @classmethod
    def of(cls, plain: nn.Conv2d, output_dtype: torch.dtype) -> Fp32EdgeConv:
        """Build from ``plain``, sharing its weights."""
        form: dict[str, Any] = {name: getattr(plain, name) for name in _CONV_ARGUMENTS}
        edge = cls(**form, bias=plain.bias is not None, device="meta")
        edge.output_dtype = output_dtype
        edge.load_state_dict(plain.state_dict(), assign=True)
        return edge.requires_grad_(False)

    def forward(self, input: Tensor) -> Tensor:
        """Convolve (B, C, H, W) as `torch.nn.Conv2d`, in fp32."""
        channels = max(self.in_channels, self.out_channels)
        height = max(1, _STRIP_BYTES // (input.shape[0] * channels * input.shape[3] * 4))
        plain = isinstance(self.padding, str) or self.padding_mode != "zeros"
        if plain or torch.compiler.is_exporting() or input.shape[2] <= height:
            return super().forward(input.float()).to(self.output_dtype)
        return self._by_strips(input, height)

    def _by_strips(self, images: Tensor, height: int) -> Tensor:
        (stride, across), (pad, sides) = self.stride, self._pads()
        dilation, (down, right) = self.dilation, self.kernel_size
        reach, wide = dilation[0] * (down - 1) + 1, dilation[1] * (right - 1) + 1
        rows = (images.shape[2] + 2 * pad - reach) // stride + 1
        columns = (images.shape[3] + 2 * sides - wide) // across + 1
        result = torch.empty(
            images.shape[0],
            self.out_channels,
            rows,
            columns,
            dtype=self.output_dtype,
            device=images.device,
            memory_format=_order(images),
        )
        for first in range(0, rows, height):
            last = min(first + height, rows)
            low, high = first * stride - pad, (last - 1) * stride + reach - pad
            strip = images[:, :, max(low, 0) : high].float()
            strip = F.pad(strip, (0, 0, max(-low, 0), max(high - images.shape[2], 0)))
            result[:, :, first:last] = F.conv2d(
                strip, self.weight, self.bias, self.stride, (0, sides), dilation, self.groups
            )
        return result

    def _pads(self) -> tuple[int, int]:
        assert not isinstance(self.padding, str)
        rows, sides = self.padding
        return rows, sides


def _order(images: Tensor) -> torch.memory_format:
    last = images.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last and not images.is_contiguous() else torch.contiguous_format


@torch.no_grad()
def to_low_precision(network: nn.Module, dtype: torch.dtype, image: Tensor) -> LowPrecisionWrapper:
    """Return a copy of ``network`` in ``dtype``, first and last convolution in fp32.

    Convolutions between images at both ends, and constant filters of the image, stay in fp32 as
    well: what is rounded where the image enters, where it leaves and where it is added costs more
    than everything between. Accuracy: approximate.

    A network that cannot be run so is all in ``dtype``, with the ``reason`` in the result.

    Args:
        image: Any (1, C, H, W) that the network takes; it is run twice to find the order of the
            layers and to verify the result.
    """
    edges, image_filters = _find_edge_layers(network, image, dtype)
    mixed = copy.deepcopy(network).to(dtype)
    for name, part in {**edges, **image_filters}.items():
        _put(mixed, name, part)
    kept = {id(part) for part in mixed.modules() if isinstance(part, Fp32EdgeConv)}
    kept |= {id(part) for part in image_filters.values()}
    for layer in mixed.modules():
        if id(layer) not in kept and _is_leaf(layer) and _floats(layer.parameters()):
            layer.register_forward_pre_hook(_cast)
    try:
        mixed(image)
    except RuntimeError as error:
        # Some layers use the weights of others, which no hook sees.
        reason = str(error).strip().partition("\n")[0]
        return LowPrecisionWrapper(copy.deepcopy(network).to(dtype), dtype, reason)
    return LowPrecisionWrapper(mixed, torch.float32)


def _find_edge_layers(
    network: nn.Module, image: Tensor, dtype: torch.dtype
) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """Return by name the convolutions at both ends, and weightless filters of images."""
    order: list[str] = []
    pictures: list[str] = []
    named = dict(network.named_modules())

    def seen(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def note(layer: nn.Module, args: tuple[Any, ...]) -> None:
            if _conv_of(layer) is not None:
                order.append(name)
            elif args and args[0].dim() == 4 and args[0].shape[1] <= _MAX_IMAGE_CHANNELS:
                pictures.append(name)

        return note

    hooks = [
        layer.register_forward_pre_hook(seen(name))
        for name, layer in named.items()
        if _conv_of(layer) is not None or (_is_leaf(layer) and _is_filter(layer))
    ]
    try:
        network(image)
    finally:
        for hook in hooks:
            hook.remove()
    edges: dict[str, nn.Module] = {}
    for names, into in ((order, dtype), (order[::-1], torch.float32)):
        for name in names:
            conv = _conv_of(named[name])
            assert conv is not None
            picture = max(conv.in_channels, conv.out_channels) <= _MAX_IMAGE_CHANNELS
            edges[name] = Fp32EdgeConv.of(conv, torch.float32 if picture else into)
            if not picture:
                break
    return edges, {name: copy.deepcopy(named[name]) for name in pictures}


def _conv_of(layer: nn.Module) -> nn.Conv2d | None:
    """Return the Conv2d that a layer is or replaces, or None."""
    stand_ins = OptimizedFirstConv, OptimizedNarrowConv, OptimizedPointwiseConv, OptimizedTail
    plain = layer.plain if isinstance(layer, stand_ins) else layer
    return plain if type(plain) is nn.Conv2d else None


def _is_leaf(layer: nn.Module) -> bool:
    return next(layer.children(), None) is None


def _is_filter(layer: nn.Module) -> bool:
    """Return whether the layer has floating-point buffers and no parameters."""
    return bool(_floats(layer.buffers())) and next(layer.parameters(), None) is None


def _floats(tensors: Any) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor.is_floating_point()]


def _put(network: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    if isinstance(tail := network.get_submodule(name), OptimizedTail):
        tail.replace_last(layer)
    else:
        setattr(network.get_submodule(parent), own, layer)


def _cast(layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Forward pre-hook that casts inputs to the dtype of the layer's weights."""
    dtype = _floats(layer.parameters())[0].dtype
    return tuple(
        one.to(dtype) if isinstance(one, Tensor) and one.is_floating_point() else one
        for one in args
    )
