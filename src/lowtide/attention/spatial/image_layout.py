"""Memory layout of images: checks, bands of rows, and projections of pixels."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.attention.cpu_ops import (
    cpu_linear,
    onednn_linear_any_layout,
    uses_onednn,
)
from lowtide.core.errors import UsageError


def check_image(image: Tensor, channels: int) -> None:
    """Validate that ``image`` is (B, C, H, W) in floating point, C being ``channels``.

    Raises:
        UsageError: it is not, or has no pixels.
    """
    shape = "×".join(map(str, image.shape)) or "()"
    if image.dim() != 4 or image.shape[1] != channels:
        hint = "(batch, channels, height, width); `.permute(0, 3, 1, 2)` moves channels forward"
        raise UsageError(f"this module needs {channels} channels, not {shape}", hint=hint)
    if not image.is_floating_point():
        raise UsageError(f"this module needs a floating-point dtype, not {image.dtype}")
    if 0 in image.shape:
        raise UsageError(f"an image of {shape} has no pixels")


def check_heads(channels: int, heads: int) -> int:
    """Return the channels per head.

    Raises:
        UsageError: heads do not divide the channels.
    """
    if heads < 1 or channels % heads:
        raise UsageError(f"{channels} channels cannot be divided into {heads} heads")
    return channels // heads


def default_heads(channels: int) -> int:
    """Return the default number of heads: one per 32 channels if they divide, else 1.

    Fewer and wider heads take less time.
    """
    return channels // 32 if channels % 32 == 0 else 1


def channels_last(image: Tensor) -> Tensor:
    """View (B, C, H, W) as (B, H, W, C)."""
    return image.permute(0, 2, 3, 1)


def pointwise_conv(image: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute a 1×1 convolution of (B, C, H, W): (B, H, W, out channels).

    ``weight`` is (out channels, C).
    """
    return linear_pixels(rows_as_pixels(image, weight), weight, bias)


def layer_rows(layer: nn.Linear, first: int, last: int) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias of the output channels from ``first`` to before ``last``."""
    rows = slice(first, last)
    bias = None if layer.bias is None else layer.bias[rows]
    return layer.weight[rows], bias


def rows_as_pixels(image: Tensor, weight: Tensor) -> Tensor:
    """Permute (B, C, H, W) to (B, H, W, C), the input of `linear_pixels`.

    A single channels-first image is copied for oneDNN, first contiguous and then transposed: that
    costs less than oneDNN's products gain. PyTorch's own products take it without a copy.
    """
    if torch.compiler.is_exporting() or not (
        _is_channels_first(image) and uses_onednn(image, weight)
    ):
        return channels_last(image)
    return image[0].contiguous().flatten(1).T.contiguous().view(1, *image.shape[2:], -1)


def linear_pixels(pixels: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Apply a linear layer to pixels (B, H, W, C): (B, H, W, out channels).

    ``pixels`` is the result of `rows_as_pixels` or some of its rows, ``weight`` is (out channels,
    C).
    """
    if torch.compiler.is_exporting() or len(pixels) > 1:
        return F.linear(pixels, weight, bias)
    image = pixels.permute(0, 3, 1, 2)
    if _is_channels_first(image):
        given = image[0].flatten(1).T
        found = given @ weight.T if bias is None else torch.addmm(bias, given, weight.T)
        return found.view(*pixels.shape[:3], -1)
    return cpu_linear(pixels, weight, bias)


def _is_channels_first(image: Tensor) -> bool:
    """Return whether it is a single channels-first image with contiguous rows."""
    return len(image) == 1 and image.stride(1) != 1 and image.stride(3) == 1


def row_spans(height: int, width: int, pixels: int = 1 << 15) -> list[tuple[int, int]]:
    """Return (first, last) of bands of whole rows, from the top down.

    A band has about ``pixels`` pixels. A single band during export, where the size is symbolic.
    """
    if torch.compiler.is_exporting():
        return [(0, height)]
    step = max(1, pixels // width)
    return [(first, min(first + step, height)) for first in range(0, height, step)]


def gather_rows(like: Tensor, rows: int, bands: Iterable[tuple[int, Tensor]]) -> Tensor:
    """Assemble bands (first row, (B, rows, W, C)) into (B, C, rows, W).

    Without gradients each band is written directly to its place, so that only one is held in
    addition to the result. The result has the memory format of ``like``.
    """
    if torch.is_grad_enabled():
        return channels_first(torch.cat([piece for _, piece in bands], 1), like)
    result: Tensor | None = None
    for first, piece in bands:
        if result is None:
            batch, _, width, channels = piece.shape
            result = torch.empty(
                batch,
                channels,
                rows,
                width,
                dtype=piece.dtype,
                device=piece.device,
                memory_format=memory_format(like),
            )
        channels_last(result)[:, first : first + piece.shape[1]] = piece
        del piece
    assert result is not None
    return result


def supports_gather_linear(layer: nn.Linear, image: Tensor) -> bool:
    """Return whether `gather_linear` can write a result like this image (B, C, H, W)."""
    mixed = torch.is_autocast_enabled(image.device.type)
    last = memory_format(image) == torch.channels_last
    return len(image) == 1 and not (last or mixed or torch.is_grad_enabled())


def gather_linear(layer: nn.Linear, rows: int, bands: Iterable[tuple[int, Tensor]]) -> Tensor:
    """Apply ``layer`` to bands (first row, (1, rows, W, C)), as (1, C, rows, W).

    Each product is written directly to its place in the result. Bands may extend beyond the result;
    they are computed as a whole, so that a row rounds equally whichever rows are requested.
    """
    result: Tensor | None = None
    for at, piece in bands:
        count, width = piece.shape[1:3]
        if result is None:
            result = piece.new_empty(1, layer.out_features, rows, width)
        first, last = max(at, 0), min(at + count, rows)
        place = result[0, :, first:last].flatten(1)
        pixels = piece[0].flatten(0, 1)
        if last - first == count:
            _product(layer, pixels, out=place)
        else:
            made = _product(layer, pixels)
            place.copy_(made[:, (first - at) * width : (last - at) * width])
        del piece, pixels
    assert result is not None
    return result


def _product(layer: nn.Linear, pixels: Tensor, out: Tensor | None = None) -> Tensor:
    """Apply the layer to (pixels, channels), transposed to (channels, pixels)."""
    weight = layer.weight.detach()  # no gradient is recorded, and oneDNN takes no parameters
    if uses_onednn(weight, pixels):
        found = onednn_linear_any_layout(weight, pixels.contiguous())
        return torch.add(found, 0 if layer.bias is None else layer.bias[:, None], out=out)
    if layer.bias is None:
        return torch.mm(weight, pixels.T, out=out)
    return torch.addmm(layer.bias[:, None], weight, pixels.T, out=out)


def channels_first(tensor: Tensor, like: Tensor) -> Tensor:
    """Permute (B, H, W, C) to (B, C, H, W) in the memory format of ``like``."""
    return tensor.permute(0, 3, 1, 2).contiguous(memory_format=memory_format(like))


def memory_format(image: Tensor) -> torch.memory_format:
    """Return the memory format of an image (B, C, H, W).

    Channels-last only if it is not contiguous as well, as images with a side of 1 are.
    """
    last = image.is_contiguous(memory_format=torch.channels_last) and not image.is_contiguous()
    return torch.channels_last if last else torch.contiguous_format
