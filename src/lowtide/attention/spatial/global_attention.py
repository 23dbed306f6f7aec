"""Attention to all pixels of an image by sums over them: linear, channel and transposed."""

from __future__ import annotations

from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.attention.spatial.image_layout import (
    channels_last,
    check_heads,
    check_image,
    default_heads,
    gather_rows,
    layer_rows,
    pointwise_conv,
    row_spans,
)
from lowtide.core.errors import UsageError


class LinearAttention(nn.Module):
    """Linear attention: weights φ(q)·φ(k) instead of exp(q·k), over all pixels.

    φ(x) = elu(x) + 1, and the result is φ(q) Σ φ(k) vᵀ / φ(q)·Σ φ(k) (Linear Transformer, arXiv
    2006.16236): a mean of the values, whatever the number of pixels. Takes and returns (B,
    ``channels``, H, W), without a residual. Costs, for N pixels, C channels and a head dim of d:

    - FLOPs: 8·N·C² for the projections and 4·N·C·d for attention;
    - memory in addition to input and result: C·(d + 1) sums, and about 4·C elements for each pixel
      of a band of rows.

    Sums are in fp32 (fp64 for fp64): over a million pixels φ(q)·Σ φ(k) exceeds fp16 and has 8 bits
    in bf16. Exact up to rounding, and equal up to rounding for every band height.

    Args:
        channels: of input and result.
        heads: by default one for each 32 channels.
        bias: whether the projections have a bias.

    Raises:
        UsageError: heads do not divide the channels, or an input of another shape.
    """

    def __init__(self, channels: int, *, heads: int | None = None, bias: bool = True) -> None:
        super().__init__()
        self.channels = channels
        self.heads = default_heads(channels) if heads is None else heads
        check_heads(channels, self.heads)
        self.qkv = nn.Linear(channels, 3 * channels, bias=bias)
        self.out = nn.Linear(channels, channels, bias=bias)

    def forward(self, image: Tensor) -> Tensor:
        """Attend within a whole image: (B, C, H, W) to (B, C, H, W)."""
        check_image(image, self.channels)
        height, width = image.shape[2:]
        bands = row_spans(height, width)
        sums = reduce(torch.add, (self.sums_of(image[:, :, first:last]) for first, last in bands))
        pieces = ((first, self._result(image[:, :, first:last], sums)) for first, last in bands)
        return gather_rows(image, height, pieces)

    def sums_of(self, rows: Tensor) -> Tensor:
        """Return a band's part of Σ φ(k) vᵀ and Σ φ(k): (B, heads, head dim, head dim + 1).

        ``rows`` is (B, C, rows, W). Add up the sums of all bands, in any order, for `forward_rows`.
        """
        check_image(rows, self.channels)
        key, value = self._tokens(rows, 1, 3)
        # A column of ones computes Σ φ(k) in the same product.
        value = F.pad(value, (0, 1), value=1.0)
        return _feature(key).mT @ value

    def forward_rows(self, rows: Tensor, sums: Tensor) -> Tensor:
        """Return the result for a band (B, C, rows, W), given the sums over all rows.

        ``sums`` are those of `sums_of`, added up over all bands: (B, heads, head dim, head dim +
        1).
        """
        check_image(rows, self.channels)
        return gather_rows(rows, rows.shape[2], [(0, self._result(rows, sums))])

    def _result(self, rows: Tensor, sums: Tensor) -> Tensor:
        """Return the result for a band of rows: (B, rows, W, C)."""
        (query,) = self._tokens(rows, 0, 1)
        found = _feature(query) @ sums
        found, divisor = found[..., :-1], found[..., -1:]
        found = (found / divisor).transpose(1, 2).flatten(2)
        found = found.to(rows.dtype).unflatten(1, (rows.shape[2], rows.shape[3]))
        return self.out(found)

    def _tokens(self, rows: Tensor, first: int, last: int) -> tuple[Tensor, ...]:
        """Return projections as (B, heads, N, head dim) in at least fp32.

        Of query, key and value those from ``first`` to before ``last``.
        """
        layer = layer_rows(self.qkv, first * self.channels, last * self.channels)
        found = pointwise_conv(rows, *layer).flatten(1, 2)
        found = found.to(torch.promote_types(found.dtype, torch.float32))
        found = found.unflatten(-1, (last - first, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return found.unbind(0)


def _feature(tensor: Tensor) -> Tensor:
    return F.elu(tensor) + 1


class ChannelAttention(nn.Module):
    """Squeeze-and-excitation: a gate between 0 and 1 for each channel.

    gate = sigmoid(W₂ relu(W₁ mean(x))) (arXiv 1709.01507). Takes and returns (B, ``channels``, H,
    W). Costs, for N pixels, C channels and a reduction by r: 2·N·C + 4·C²/r FLOPs, and 2·C elements
    in addition to input and result.

    The mean is in fp32 (fp64 for fp64). Exact up to rounding.

    Args:
        channels: of input and result.
        reduction: factor by which the hidden layer has fewer channels; at least one channel
            remains.

    Raises:
        UsageError: a reduction below 1, or an input of another shape.
    """

    def __init__(self, channels: int, *, reduction: int = 16) -> None:
        super().__init__()
        if reduction < 1:
            raise UsageError(f"reduction must be at least 1, not {reduction}")
        self.channels = channels
        self.reduce = nn.Linear(channels, max(1, channels // reduction))
        self.expand = nn.Linear(max(1, channels // reduction), channels)

    def forward(self, image: Tensor) -> Tensor:
        """Scale the channels of a whole image: (B, C, H, W) to (B, C, H, W)."""
        return self.forward_rows(image, self.sums_of(image), image.shape[2] * image.shape[3])

    def sums_of(self, rows: Tensor) -> Tensor:
        """Sum over the pixels of a band of rows, (B, C).

        Add up the sums of all bands for `forward_rows`.
        """
        check_image(rows, self.channels)
        return rows.sum((2, 3), dtype=torch.promote_types(rows.dtype, torch.float32))

    def forward_rows(self, rows: Tensor, sums: Tensor, pixels: int) -> Tensor:
        """Scale a band (B, C, rows, W), given the sums (B, C) over all ``pixels``."""
        check_image(rows, self.channels)
        mean = (sums / pixels).to(self.reduce.weight.dtype)
        gate = torch.sigmoid(self.expand(F.relu(self.reduce(mean))))
        return rows * gate.to(rows.dtype)[:, :, None, None]


class TransposedAttention(nn.Module):
    """Attention between channels over all pixels, as in Restormer (arXiv 2111.09881).

    softmax(t · q̂ k̂ᵀ) v with q, k and v from 1×1 and depthwise 3×3 convolutions, q̂ and k̂
    normalized over the pixels, and a learned temperature t for each head. Takes and returns (B,
    ``channels``, H, W), without a residual. Costs, for N pixels, C channels and a head dim of d:

    - FLOPs: 8·N·C² + 54·N·C for the convolutions and 4·N·C·d for attention;
    - memory in addition to input and result: C·d elements, and about 6·C for each pixel of a band
      of rows.

    Sums are in fp32 (fp64 for fp64). Exact up to rounding, and equal up to rounding for every band
    height.

    Args:
        channels: of input and result.
        heads: by default one for each 32 channels.
        bias: whether the convolutions have a bias.

    Raises:
        UsageError: heads do not divide the channels, or an input of another shape.
    """

    def __init__(self, channels: int, *, heads: int | None = None, bias: bool = False) -> None:
        super().__init__()
        self.channels = channels
        self.heads = default_heads(channels) if heads is None else heads
        check_heads(channels, self.heads)
        self.temperature = nn.Parameter(torch.ones(self.heads, 1, 1))
        wide = 3 * channels
        self.qkv = nn.Conv2d(channels, wide, 1, bias=bias)
        self.depthwise = nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=bias)
        self.out = nn.Linear(channels, channels, bias=bias)

    def forward(self, image: Tensor) -> Tensor:
        """Attend between the channels of a whole image: (B, C, H, W) to (B, C, H, W)."""
        check_image(image, self.channels)
        height, width = image.shape[2:]
        bands = row_spans(height, width)
        sums = reduce(
            torch.add, (self._sums(self._rows(image, *band), *band, height) for band in bands)
        )
        pieces = (
            (band[0], self._result(self._rows(image, *band), sums, *band, height)) for band in bands
        )
        return gather_rows(image, height, pieces)

    def rows_needed(self, first: int, last: int, height: int) -> tuple[int, int]:
        """Return the input rows that rows ``first`` to ``last`` of sums and result need."""
        return max(first - 1, 0), min(last + 1, height)

    def sums_of(self, rows: Tensor, first: int, last: int, height: int) -> Tensor:
        """Return a band's part of q kᵀ and of the squared norms of q and k.

        (B, heads, head dim, head dim + 2), of the (B, C, rows, W) that `rows_needed` returns; add
        up the sums of all bands for `forward_rows`.
        """
        check_image(rows, self.channels)
        return self._sums(rows, first, last, height)

    def forward_rows(
        self, rows: Tensor, sums: Tensor, first: int, last: int, height: int
    ) -> Tensor:
        """Return rows ``first`` to ``last`` of the result, given the sums over all rows.

        ``rows`` is (B, C, rows, W) with the rows that `rows_needed` returns, the result (B, C,
        result rows, W). ``sums`` are those of `sums_of`.
        """
        check_image(rows, self.channels)
        return gather_rows(rows, last - first, [(0, self._result(rows, sums, first, last, height))])

    def _rows(self, image: Tensor, first: int, last: int) -> Tensor:
        low, high = self.rows_needed(first, last, image.shape[2])
        return image[:, :, low:high]

    def _sums(self, rows: Tensor, first: int, last: int, height: int) -> Tensor:
        part = slice(0, 2 * self.channels)
        query, key = self._tokens(rows, part, 2, first, last, height)
        lengths = [tensor.square().sum(-1, keepdim=True) for tensor in (query, key)]
        return torch.cat([query @ key.mT, *lengths], -1)

    def _result(self, rows: Tensor, sums: Tensor, first: int, last: int, height: int) -> Tensor:
        part = slice(2 * self.channels, 3 * self.channels)
        (value,) = self._tokens(rows, part, 1, first, last, height)
        # Equal to normalizing q and k with norms of at least 1e-12. In this order a norm of zero
        # has a gradient of zero, too.
        lengths = sums[..., -2:].clamp_min(1e-24).sqrt()
        scores = sums[..., :-2] / (lengths[..., :1] * lengths[..., 1:].mT)
        weights = (scores * self.temperature.to(scores.dtype)).softmax(-1)
        found = (weights @ value).to(rows.dtype)
        found = found.flatten(1, 2).unflatten(-1, (last - first, rows.shape[3]))
        return self.out(channels_last(found))

    def _tokens(
        self, rows: Tensor, part: slice, parts: int, first: int, last: int, height: int
    ) -> tuple[Tensor, ...]:
        """Compute some of the convolutions as (B, heads, head dim, N) in at least fp32."""
        low, high = self.rows_needed(first, last, height)
        one, other = self.qkv, self.depthwise
        found = F.conv2d(rows, one.weight[part], None if one.bias is None else one.bias[part])
        # The depthwise convolution is padded with zeros, not with the first convolution's bias.
        found = F.pad(found, (1, 1, int(low == first), int(high == last)))
        bias = None if other.bias is None else other.bias[part]
        found = F.conv2d(found, other.weight[part], bias, groups=found.shape[1])
        found = found.to(torch.promote_types(found.dtype, torch.float32)).flatten(2)
        return found.unflatten(1, (parts, self.heads, -1)).unbind(1)
