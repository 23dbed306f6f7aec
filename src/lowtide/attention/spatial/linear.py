"""Linear attention over all pixels of an image."""

from __future__ import annotations

from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.attention.spatial.image_layout import (
    check_heads,
    check_image,
    default_heads,
    gather_rows,
    layer_rows,
    pointwise_conv,
    row_spans,
)


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
