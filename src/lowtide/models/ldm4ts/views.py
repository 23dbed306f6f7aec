"""Images of a series: folded by its period, Gramian angular field, recurrence plot.

All take series [B, L, D] and return images [B, D, h, w], all windows and variables at once. A side
shorter than the series is made from piecewise means first, so that nothing of L × L values is ever
there: a view takes at most three times the 4·B·D·h·w bytes of its result (float32).
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


def view_images(series: Tensor, period: int, size: tuple[int, int]) -> Tensor:
    """Return all three views of ``series`` [B, L, D] as one image [B, 3·D, h, w].

    Channels are the folded series of each variable, then the Gramian angular fields, then the
    recurrence plots.
    """
    views = (
        segmentation(series, period, size),
        gramian_angular_field(series, size),
        recurrence_plot(series, size),
    )
    return torch.cat(views, dim=1)


def segmentation(series: Tensor, period: int, size: tuple[int, int]) -> Tensor:
    """Return ``series`` [B, L, D] folded: a row of the image is a period, the last one ends it.

    A first row that is not full repeats the first value. Values are those of the series.
    """
    batch, length, variables = series.shape
    missing = -length % period
    rows = series.transpose(1, 2)
    rows = torch.cat([rows[..., :1].expand(-1, -1, missing), rows], dim=2)
    image = rows.reshape(batch, variables, -1, period)
    height, width = size
    image = _piecewise_means(image, min(width, period))
    image = _piecewise_means(image.transpose(2, 3), min(height, image.shape[2])).transpose(2, 3)
    return _enlarge(image, size)


def gramian_angular_field(series: Tensor, size: tuple[int, int]) -> Tensor:
    """Return the cosine of the sum of two steps' angles, of ``series`` [B, L, D], in [-1, 1].

    The angle of a step is the arc cosine of its value, the least being -1 and the greatest 1; of a
    constant series all are 0. Equal to pyts's ``GramianAngularField`` where no side is longer than
    the series.
    """
    height, width = size
    row_cosine, row_sine = _angles(series, height)
    column_cosine, column_sine = _angles(series, width)
    image = row_cosine[..., :, None] * column_cosine[..., None, :]
    image = torch.addcmul(image, row_sine[..., :, None], column_sine[..., None, :], value=-1)
    return _enlarge(image, size)


def recurrence_plot(series: Tensor, size: tuple[int, int]) -> Tensor:
    """Return the distances of two steps' values of ``series`` [B, L, D], at least 0.

    Equal to pyts's ``RecurrencePlot`` of the piecewise means where no side is longer than the
    series.
    """
    height, width = (_means_of(series, side) for side in size)
    return _enlarge((height[..., :, None] - width[..., None, :]).abs(), size)


def _angles(series: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Return cosine and sine [B, D, n] of the angles of piecewise means."""
    means = _means_of(series, side)
    least, greatest = means.amin(dim=-1, keepdim=True), means.amax(dim=-1, keepdim=True)
    spread = greatest - least
    # Means of equal values differ in their last digits, which is no structure.
    level = torch.maximum(least.abs(), greatest.abs())
    constant = spread <= 16 * torch.finfo(series.dtype).eps * level
    share = (means - least) / torch.where(constant, 1, spread)
    share = torch.where(constant, 0.5, share)
    # The sine of the arc cosine of 2 · share - 1, without the digits that 1 - cosine² would lose.
    return 2 * share - 1, 2 * (share * (1 - share)).sqrt()


def _means_of(series: Tensor, side: int) -> Tensor:
    """Return piecewise means [B, D, n] of ``series`` [B, L, D], n at most ``side``."""
    return _piecewise_means(series.transpose(1, 2), min(side, series.shape[1]))


def _piecewise_means(values: Tensor, count: int) -> Tensor:
    """Return means of ``count`` stretches of the last dimension, as pyts bounds them."""
    length = values.shape[-1]
    if count == length:
        return values
    # pyts rounds these bounds down as floats, now and then to one less than the exact value.
    bounds = np.linspace(0, length, count + 1).astype(np.int64)
    first, sizes = bounds[:-1, None], np.diff(bounds)
    place = first + np.arange(sizes.max())
    inside = torch.as_tensor(place < bounds[1:, None], device=values.device)
    index = torch.as_tensor(np.minimum(place, length - 1), device=values.device)
    sums = torch.where(inside, values[..., index], 0).sum(dim=-1)
    return sums / torch.as_tensor(sizes, device=values.device)


def _enlarge(image: Tensor, size: tuple[int, int]) -> Tensor:
    if tuple(image.shape[2:]) == size:
        return image
    return F.interpolate(image, size, mode="bilinear", align_corners=False)
