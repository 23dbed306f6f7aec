"""Pages of one run: what is kept of them, and until when."""

import pytest
import torch
from torch import nn

from support.band_runs import program_of, results_by_bands


class TakenLate(nn.Module):
    """Few rows, of which each takes all, next to many that take none."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.key = nn.Linear(4, 4)

    def forward(self, image):
        pooled = nn.functional.avg_pool2d(image, 8)
        pixels = pooled.flatten(2).transpose(1, 2).unsqueeze(1)
        keys = self.key(pixels)
        seen = nn.functional.scaled_dot_product_attention(pixels, keys, keys)
        few = seen.squeeze(1).transpose(1, 2).reshape(pooled.shape)
        return image.relu(), few


@pytest.mark.parametrize("bands", [1, 3, 40])
@torch.no_grad()
def test_a_page_taken_whole_is_kept_until_the_first_band_that_takes_it(bands):
    image = torch.rand(1, 4, 40, 16)
    module = TakenLate()
    made = results_by_bands(program_of(module, image), image, bands)
    for found, wanted in zip(made, module(image), strict=True):
        assert (found - wanted).abs().max() <= 1e-6
