"""Operators without a row rule run on whole maps, also where the only way leads through them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide import BudgetError
from lowtide.streaming.planner.stream_planner import StreamPlanner


class Net(nn.Module):
    """A convolution, an operator without a skip around it, and a convolution again."""

    def __init__(self, middle):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.down = nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.flow, self.scores = nn.Conv2d(8, 2, 1), nn.Linear(8, 24)
        self.recurrent = nn.LSTM(8, 8, batch_first=True)
        self.last = nn.Conv2d(8, 3, 3, padding=1)
        self.middle = middle

    def forward(self, image):
        return self.last(self.middle(self, self.first(image)))


def resized(net, x):
    return F.interpolate(net.down(x), size=x.shape[2:], mode="bilinear")


def head_of_a_segmentation(net, x):
    small = net.down(x)
    pooled = F.adaptive_avg_pool2d(small, 1)
    both = small + F.interpolate(pooled, size=small.shape[2:], mode="bilinear")
    return F.interpolate(both, size=x.shape[2:], mode="bicubic")


def warped(net, x):
    height, width = x.shape[2:]
    rows, columns = torch.linspace(-1, 1, height), torch.linspace(-1, 1, width)
    grid = torch.stack(torch.meshgrid(columns, rows, indexing="xy"), -1)[None]
    return F.grid_sample(x, grid + 0.1 * net.flow(x).permute(0, 2, 3, 1), align_corners=True)


def attention_of_tokens(net, x):
    small = F.avg_pool2d(x, 4)
    batch, channels, height, width = small.shape
    tokens = small.flatten(2).transpose(1, 2)
    q, k, v = net.scores(tokens).view(batch, -1, 3, 2, 4).permute(2, 0, 3, 1, 4)
    made = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(tokens.shape)
    made = made.transpose(1, 2).reshape(batch, channels, height, width)
    return F.interpolate(made, size=x.shape[2:], mode="bilinear")


def recurrent(net, x):
    steps = net.recurrent(x.mean(3).transpose(1, 2))[0]
    return steps.transpose(1, 2)[..., None] + x


MIDDLES = {
    "resize to a size": resized,
    "segmentation": head_of_a_segmentation,
    "warp": warped,
    "attention": attention_of_tokens,
    "LSTM": recurrent,
    "sum down the rows": lambda _, x: x.cumsum(2) / 64,
    "sorted rows": lambda _, x: x.sort(2)[0].flip(2),
    "spectrum": lambda _, x: torch.fft.irfft2(torch.fft.rfft2(x) * 0.5, s=x.shape[2:]),
}


pytestmark = pytest.mark.usefixtures("results_alone")


@pytest.mark.parametrize("name", MIDDLES)
def test_the_only_way_may_lead_through_a_whole_map(name):
    module, image = Net(MIDDLES[name]).eval(), torch.rand(1, 3, 75, 48)
    found = lowtide.stream(module, budget="64MiB")(image)
    torch.testing.assert_close(found, module(image), rtol=1e-4, atol=1e-5)


class Several(Net):
    def forward(self, image):
        return super().forward(image), image.mean((2, 3)), image.cumsum(3)


def test_several_results_keep_their_places():
    module, image = Several(lambda _, x: x.cumsum(2)).eval(), torch.rand(1, 3, 75, 48)
    found = lowtide.stream(module, budget="64MiB")(image)
    torch.testing.assert_close(found, module(image), rtol=1e-4, atol=1e-5)


def least_rows(count):
    """Return the least bytes of bands for this many whole operators one after another."""

    def middle(_, x):
        for _ in range(count):
            x = x.cumsum(2).cumsum(3) / 64
        return x

    with pytest.raises(BudgetError) as refused:
        StreamPlanner(Net(middle).eval(), torch.rand(1, 3, 75, 48)).choose(0)
    return refused.value.smallest


def test_whole_maps_are_freed_after_their_last_use():
    assert least_rows(12) < 1.5 * least_rows(3)


def test_a_budget_error_says_that_the_model_itself_takes_less():
    module = Net(lambda _, x: x.cumsum(2)).eval()
    with pytest.raises(BudgetError, match="and the model itself about") as refused:
        lowtide.stream(module, budget="1MiB")(torch.rand(1, 3, 75, 48))
    assert refused.value.hint.startswith("call the model itself")
