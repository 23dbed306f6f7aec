"""Alpha: no fringe, no color from under transparency, opaque stays opaque."""

import numpy as np
import pytest
import torch

from lowtide import ModelError
from lowtide.jobs.images.adapter import require_image_channels
from support.toy_models import conv_net, make_plan, network, run_array


class Sharpen(torch.nn.Module):
    """A nearest ×2 with an overshooting filter: rings at edges as networks do."""

    def forward(self, x):
        big = x.repeat_interleave(2, 2).repeat_interleave(2, 3)
        soft = torch.nn.functional.avg_pool2d(big, 5, 1, 2, count_include_pad=False)
        return big + 0.5 * (big - soft)


def disc(color, hidden, side=64):
    """A soft-edged disc of one color over transparency that hides another color."""
    y, x = np.mgrid[:side, :side] - side / 2 + 0.5
    alpha = np.clip(20 - np.hypot(x, y), 0, 1)
    image = np.empty((side, side, 4), np.uint8)
    image[..., :3] = np.where(alpha[..., None] > 0, color, hidden)
    image[..., 3] = np.rint(alpha * 255)
    return image


@pytest.mark.parametrize(
    ("color", "hidden"),
    [((255, 0, 0), (0, 0, 0)), ((255, 0, 0), (0, 255, 0)), ((200, 180, 40), (255, 255, 255))],
)
def test_no_fringe_round_a_transparent_edge(color, hidden):
    image = disc(color, hidden)
    result, _ = run_array(network(Sharpen()), image, make_plan(image, 2))
    visible = result[result[..., 3] > 25]
    assert np.abs(visible[:, :3].astype(int) - color).max() <= 12


def test_hidden_color_does_not_reach_the_result():
    results = [
        run_array(network(conv_net()), image, make_plan(image, 4))[0]
        for image in (disc((90, 60, 30), (0, 0, 0)), disc((90, 60, 30), (250, 250, 250)))
    ]
    np.testing.assert_array_equal(results[0], results[1])


def test_opaque_stays_opaque_and_clear_stays_clear():
    image = disc((90, 60, 30), (0, 0, 0))
    result, _ = run_array(network(Sharpen()), image, make_plan(image, 2))
    assert (result[60:68, 60:68, 3] == 255).all()
    assert (result[:8, :8, 3] == 0).all()
    image[..., 3] = 255
    result, _ = run_array(network(conv_net()), image, make_plan(image, 4))
    assert (result[..., 3] == 255).all()


def test_an_opaque_alpha_changes_no_color():
    image = np.random.default_rng(0).integers(0, 256, (40, 40, 4), np.uint8)
    image[..., 3] = 255
    with_alpha, _ = run_array(network(Sharpen()), image, make_plan(image, 4))
    plain = np.ascontiguousarray(image[..., :3])
    without, _ = run_array(network(Sharpen()), plain, make_plan(plain, 4))
    np.testing.assert_array_equal(with_alpha[..., :3], without)


def test_channels_that_carry_no_image_are_refused():
    for channels in ((3, 1), (4, 4), (1, 3)):
        with pytest.raises(ModelError, match="channels"):
            require_image_channels(*channels)
