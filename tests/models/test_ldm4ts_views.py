"""Images of series and of paths: equal to their definitions, to pyts, and exactly inverted."""

import itertools
import math

import numpy as np
import pytest
import torch

from lowtide import UsageError
from lowtide.models.ldm4ts.conditioning import (
    gramian_angular_field,
    recurrence_plot,
    segmentation_image,
    view_images,
)
from lowtide.models.ldm4ts.path_image import PathImageMap

# Horizon, variables, period and image size.
PATHS = [
    (96, 7, 24, (64, 64)),
    (97, 1, 24, (64, 64)),
    (15, 1, 24, (224, 224)),
    (240, 2, 60, (32, 48)),
    (720, 1, 7, (64, 64)),
    (1535, 1, 97, (32, 48)),
    (1, 1, 1, (16, 16)),
]


def walks(*shape):
    return torch.from_numpy(np.random.default_rng(0).standard_normal(shape).cumsum(axis=1))


def piecewise_means(series, count):
    bounds = [number * len(series) // count for number in range(count + 1)]
    pairs = itertools.pairwise(bounds)
    return [sum(series[first:last]) / (last - first) for first, last in pairs]


def angles(means):
    least, greatest = min(means), max(means)
    return [math.acos((value - least) / (greatest - least) * 2 - 1) for value in means]


@pytest.mark.parametrize("size", [(10, 10), (7, 12), (37, 37)])
def test_views_are_their_definitions_on_every_series(size):
    series = walks(2, 37, 3)
    fields, plots = gramian_angular_field(series, size), recurrence_plot(series, size)
    assert fields.shape == plots.shape == (2, 3, *size)
    for window in range(2):
        for variable in range(3):
            values = series[window, :, variable].tolist()
            rows, columns = (piecewise_means(values, side) for side in size)
            field = [[math.cos(i + j) for j in angles(columns)] for i in angles(rows)]
            plot = [[abs(i - j) for j in columns] for i in rows]
            assert torch.allclose(
                fields[window, variable], torch.tensor(field, dtype=torch.float64), atol=1e-9
            )
            assert torch.allclose(
                plots[window, variable], torch.tensor(plot, dtype=torch.float64), atol=1e-9
            )


@pytest.mark.parametrize("side", [16, 48, 99])
def test_views_equal_those_of_pyts(side):
    image = pytest.importorskip("pyts.image", reason="pyts, the reference, is not installed")
    approximation = pytest.importorskip("pyts.approximation")
    series = walks(2, 99, 3)
    rows = series.transpose(1, 2).reshape(6, 99).numpy()
    means = approximation.PiecewiseAggregateApproximation(
        window_size=None, output_size=side, overlapping=False
    ).transform(rows)
    references = (
        (gramian_angular_field, image.GramianAngularField(image_size=side).transform(rows)),
        (recurrence_plot, image.RecurrencePlot().transform(means)),
    )
    for view, reference in references:
        found = view(series, (side, side)).reshape(6, side, side).numpy()
        np.testing.assert_allclose(found, reference, atol=1e-7)


def test_a_folded_series_has_a_period_in_each_row_and_ends_with_the_last():
    series = torch.arange(10.0)[None, :, None]
    image = segmentation_image(series, 4, (3, 4))
    assert image[0, 0].tolist() == [[0, 0, 0, 1], [2, 3, 4, 5], [6, 7, 8, 9]]
    halves = segmentation_image(series, 4, (3, 2))
    assert halves[0, 0].tolist() == [[0, 0.5], [2.5, 4.5], [6.5, 8.5]]
    assert segmentation_image(walks(2, 50, 3), 60, (24, 40)).shape == (2, 3, 24, 40)


def test_views_of_constant_series_are_finite_and_windows_do_not_see_each_other():
    series = walks(3, 101, 2).float()
    series[1] = 0.3
    images = view_images(series, 24, (32, 48))
    assert images.shape == (3, 6, 32, 48)
    assert images.isfinite().all()
    assert torch.allclose(images[1, :2], torch.tensor(0.3))
    assert torch.equal(images[1, 2:4], torch.full((2, 32, 48), -1.0))
    assert images[1, 4:].max() < 1e-6
    for window in range(3):
        assert torch.equal(view_images(series[window, None], 24, (32, 48))[0], images[window])


def test_images_of_paths_are_inverted_bit_for_bit():
    for horizon, variables, period, size in PATHS:
        images = PathImageMap(horizon, variables, period, size)
        path = walks(3, horizon, variables).float()
        image = images.to_image(path)
        assert image.shape == (3, variables, *size)
        assert torch.equal(images.to_path(image), path)
        # Noise of pixels is averaged over the rectangle of each step.
        noise = torch.randn(image.shape, generator=torch.Generator().manual_seed(0))
        deviation = (images.to_path(image + noise) - path).square().mean().sqrt()
        assert deviation <= 1.5 * (horizon / math.prod(size)) ** 0.5


def test_a_path_image_has_a_period_in_each_row_and_room_for_all_steps():
    image = PathImageMap(10, 1, 4, (6, 8)).to_image(torch.arange(10.0)[None, :, None])
    assert image[0, 0, 0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert image[0, 0, :, 0].tolist() == [0, 0, 4, 4, 8, 8]
    with pytest.raises(UsageError, match="path of 257 steps has no place in an image of 16x16"):
        PathImageMap(257, 1, 24, (16, 16))
