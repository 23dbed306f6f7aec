"""Window attention of SwinIR, DRCT and HAT, and HAT's overlapping windows, as one operator; blocks
of SwinIR and DRCT."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.attention.window_attention import MaskPattern, attend_windows, patterns_in_range
from lowtide.models.optimized.optimized_module import OptimizedModule, is_recorded
from lowtide.models.optimized.padded_heads import PaddedHeads
from lowtide.models.optimized.shift_mask import ShiftMask, WindowOrder
from lowtide.models.optimized.token_linear import linear_add

# What some windows hold while they go through a block, in numbers for each of its channels, and at
# most in bytes: more on a card, which has work for many of them.
_HELD, _PART_BYTES, _CARD_PART_BYTES = 8, 32 << 20, 256 << 20

# What comes of pixels behind an attention: of them normalized, and as they are.
End = Callable[[Tensor, Tensor], Tensor]


class OptimizedWindowAttention(OptimizedModule):
    """``WindowAttention(x, mask)`` of spandrel's SwinIR and DRCT, ``(x, rpi, mask)`` of its HAT.

    ``x`` is (windows, places, channels) and so is the result. ``mask`` is None, a `ShiftMask`, or a
    tensor (windows of an image, places, places), with which the part runs as it was.
    """

    def forward(
        self, x: Tensor, rpi: Tensor | None = None, mask: Tensor | ShiftMask | None = None
    ) -> Tensor:
        """The result for each window."""
        if torch.compiler.is_exporting() or isinstance(mask, Tensor):
            given = {} if rpi is None else {"rpi": rpi}
            return self.plain(x, **given, mask=mask)
        patterns = () if mask is None else mask.patterns(x)
        return self.attend(x, PaddedHeads(self.plain, x), self.bias(rpi), patterns)

    def bias(self, rpi: Tensor | None = None) -> Tensor:
        """What is added to all scores, (1, heads, places, places)."""
        plain = self.plain
        index = plain.relative_position_index if rpi is None else rpi
        return gathered_bias(plain.relative_position_bias_table, index, len(index))

    def attend(
        self,
        x: Tensor,
        heads: PaddedHeads,
        bias: Tensor,
        patterns: Sequence[MaskPattern],
        plus: Tensor | None = None,
    ) -> Tensor:
        """The result for each window, with this bias, ``plus`` what is there already."""
        query, key, value = heads.split(x).permute(2, 0, 3, 1, 4)
        found = attend_windows(query, key, value, bias, patterns, self.plain.scale)
        return heads.join(found.transpose(1, 2).flatten(2), plus)


class OptimizedSwinBlock(OptimizedModule):
    """``SwinTransformerBlock(x, x_size)`` of spandrel's SwinIR and DRCT.

    Some windows at a time go through all of it, attention and what follows for each pixel, so that
    what lies between fits in caches, and queries, keys and values are never there for the whole
    image. Those along an edge, which have masks, come last.

    Where ``overwrites`` is set, nothing else needs what it is given, and the result takes its
    place.
    """

    overwrites = False

    @staticmethod
    def takes(part: Any) -> bool:
        """Whether its attention is one operator."""
        return isinstance(part.attn, OptimizedWindowAttention)

    def forward(self, x: Tensor, x_size: tuple[int, int]) -> Tensor:
        """(images, pixels, channels) to the same."""
        plain = self.plain
        if torch.compiler.is_exporting() or plain.training or len(x) > 1:
            return plain(x, x_size)
        over = self.overwrites and not is_recorded()
        result = x if over else torch.empty_like(x)
        for places, _, found in self.parts(x[0], x_size, overwritten=over):
            scatter_rows(result[0], places, found)
        return result

    def parts(
        self,
        pixels: Tensor,
        x_size: tuple[int, int],
        *,
        overwritten: bool = False,
        end: End | None = None,
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Part by part which of the ``pixels`` (pixels, channels) it is of, what they are, and
        what the block makes of them, or its attention and ``end``."""
        plain = self.plain
        order = window_order(*x_size, plain.window_size, plain.shift_size, pixels.device)
        bias = plain.attn.bias()
        end = end or functools.partial(linear_add, plain.mlp)
        return self._parts(pixels, order.there, bias, order.patterns(bias), end, overwritten)

    def _parts(
        self,
        pixels: Tensor,
        there: Tensor,
        bias: Tensor,
        patterns: Sequence[MaskPattern],
        end: End,
        overwritten: bool,
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """The same in the order ``there``; pixels may be ``overwritten`` in between."""
        plain = self.plain
        places = plain.window_size**2
        heads = PaddedHeads(plain.attn.plain, pixels)
        total = len(pixels) // places
        some = windows_per_chunk(pixels, total)
        # The last part may have windows of the one before it.
        rest = there[(total - some) * places :]
        last = pixels.index_select(0, rest) if overwritten else None
        for first in range(0, total, some):
            first = min(first, total - some)
            chosen = there[first * places : (first + some) * places]
            kept = last if first == total - some else None
            given = pixels.index_select(0, chosen) if kept is None else kept
            windows = plain.norm1(given).view(some, places, -1)
            here = patterns_in_range(patterns, first, first + some)
            seen = plain.attn.attend(windows, heads, bias, here, given.view_as(windows))
            seen = seen.view_as(given)
            yield chosen, given, end(plain.norm2(seen), seen)


def windows_per_chunk(x: Tensor, total: int) -> int:
    """How many of ``total`` windows of ``x``, pixels of some channels, go through a block together.

    All parts are of one size, and the last one begins earlier where it would be smaller: oneDNN
    keeps a kernel for each number of tokens, tens of megabytes for those of a deep model.
    """
    if torch.compiler.is_compiling():
        return total  # each part would be compiled for itself
    limit = _PART_BYTES if x.device.type == "cpu" else _CARD_PART_BYTES
    window = _HELD * (x.numel() // total) * x.element_size()
    most = min(total, max(1, limit // window))
    # Those of which fewest windows are run twice, and of these the largest.
    return min(range((most + 1) // 2, most + 1), key=lambda size: (-total % size, -size))


def scatter_rows(pixels: Tensor, places: Tensor, rows: Tensor) -> None:
    """``pixels[places] = rows``, on a CPU 16 bytes at a time where they allow it: PyTorch's own
    goes number by number."""
    plain = is_recorded() or rows.device.type != "cpu"
    if not plain and _is_wide(pixels) and _is_wide(rows):
        pixels, rows = pixels.view(torch.complex128), rows.view(torch.complex128)
    pixels.index_copy_(0, places, rows)


def _is_wide(rows: Tensor) -> bool:
    """Whether (rows, channels) are of whole 16 bytes each, which begin at such."""
    sides = rows.shape[1], rows.stride(0), rows.storage_offset()
    return rows.stride(1) == 1 and all(side * rows.element_size() % 16 == 0 for side in sides)


@functools.lru_cache(maxsize=8)
def window_order(
    height: int, width: int, window: int, shift: int, device: torch.device
) -> WindowOrder:
    """Found once for an image, not in every block."""
    return WindowOrder.of(ShiftMask(height, width, window, shift), device)


class OptimizedOverlapAttention(OptimizedModule):
    """HAT's ``OCAB(x, x_size, rpi)``: windows look at larger ones around them.

    Keys and values are cut out of the image, which is not unfolded to columns.
    """

    def forward(self, x: Tensor, x_size: tuple[int, int], rpi: Tensor) -> Tensor:
        """(images, pixels, channels) to the same."""
        if torch.compiler.is_exporting():
            return self.plain(x, x_size, rpi)
        plain = self.plain
        height, width = x_size
        side, seen = plain.window_size, plain.overlap_win_size
        heads = PaddedHeads(plain, x)
        query, key, value = heads.split(plain.norm1(x).unflatten(1, x_size)).unbind(3)
        bias = gathered_bias(plain.relative_position_bias_table, rpi, side * side)
        found = attend_windows(
            partition_windows(query, side, side),
            partition_windows(key, side, seen),
            partition_windows(value, side, seen),
            bias,
            (),
            plain.scale,
        )
        x = heads.join(merge_windows(found, height, width, (side, side)), x)
        return linear_add(plain.mlp, plain.norm2(x), x)


def gathered_bias(table: Tensor, index: Tensor, places: int) -> Tensor:
    """(1, heads, places, places seen) of a table of relative places (places, heads)."""
    chosen = table.detach()[index.flatten()]
    return chosen.view(places, -1, table.shape[1]).permute(2, 0, 1).contiguous()[None]


def partition_windows(image: Tensor, step: int, size: int) -> Tensor:
    """(images, height, width, heads, channels) to (windows, heads, places, channels): one window
    of ``size`` for every ``step`` rows and columns, centered on them, with zeros around."""
    margin = (size - step) // 2
    if margin:
        image = F.pad(image, (0, 0, 0, 0, margin, margin, margin, margin))
    cut = image.unfold(1, size, step).unfold(2, size, step)
    # (images, rows, columns, heads, channels, down, across)
    return cut.permute(0, 1, 2, 3, 5, 6, 4).flatten(4, 5).flatten(0, 2)


def merge_windows(windows: Tensor, height: int, width: int, window: tuple[int, int]) -> Tensor:
    """(windows, heads, places, channels) to (images, pixels, heads · channels)."""
    rows, columns = height // window[0], width // window[1]
    found = windows.transpose(1, 2).flatten(2)
    found = found.view(-1, rows, columns, *window, found.shape[-1])
    return found.transpose(2, 3).reshape(len(found), height * width, -1)
