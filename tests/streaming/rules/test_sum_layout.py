"""Sums of pixels and tokens: where they lie token after token, and where they do not."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lowtide.streaming.rules.sum_layout import contiguous_sums
from support.band_runs import by_bands, check_parity, convolved_orders, program_of


class Blocks(nn.Module):
    """As SwinIR has them: tokens through norms and products, then a convolution around them."""

    def __init__(self, channels=6, blocks=2, groups=2):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.norms = nn.ModuleList(nn.LayerNorm(channels) for _ in range(blocks * groups))
        self.inner = nn.ModuleList(nn.Linear(channels, channels) for _ in range(blocks * groups))
        self.around = nn.ModuleList(
            nn.Conv2d(channels, channels, 3, padding=1) for _ in range(groups)
        )
        self.last = nn.Conv2d(channels, 3, 3, padding=1)

    def forward(self, image):
        height, width = image.shape[2:]
        x = self.first(image)
        tokens = x.flatten(2).transpose(1, 2)
        layers = list(zip(self.norms, self.inner, strict=True))
        for group, around in enumerate(self.around):
            kept = tokens
            each = len(layers) // len(self.around)
            for norm, inner in layers[group * each : (group + 1) * each]:
                tokens = tokens + inner(norm(tokens))
            map_ = tokens.transpose(1, 2).view(1, -1, height, width)
            tokens = around(map_).flatten(2).transpose(1, 2) + kept
        return self.last(tokens.transpose(1, 2).view(1, -1, height, width) + x)


def test_sums_that_norms_read_are_found():
    image = torch.rand(1, 3, 24, 10)
    program = program_of(Blocks(), image)
    # All but those that a convolution reads: the last of each group, and that with the image.
    assert len(contiguous_sums(program.graph)) == 3
    convolutions = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.ReLU()).eval()
    assert contiguous_sums(program_of(convolutions, image).graph) == set()


class Parallel(Blocks):
    """As HAT has them: two convolutions of the normalized tokens, parallel to each inner layer."""

    def __init__(self):
        super().__init__()
        self.parallel = nn.ModuleList(
            nn.Sequential(nn.Conv2d(6, 3, 3, padding=1), nn.GELU(), nn.Conv2d(3, 6, 3, padding=1))
            for _ in self.norms
        )

    def forward(self, image):
        height, width = image.shape[2:]
        x = self.first(image)
        tokens = x.flatten(2).transpose(1, 2)
        for norm, inner, parallel in zip(self.norms, self.inner, self.parallel, strict=True):
            normed = norm(tokens)
            pixels = parallel(normed.view(1, height, width, -1).permute(0, 3, 1, 2))
            near = pixels.permute(0, 2, 3, 1).contiguous().view(tokens.shape)
            tokens = tokens + inner(normed) + near
        return self.last(tokens.transpose(1, 2).view(1, -1, height, width) + x)


@pytest.mark.parametrize("kind", [Blocks, Parallel])
@pytest.mark.parametrize("size", [(24, 10), (31, 13)])
def test_they_give_the_same_values(size, kind):
    check_parity(kind().double(), torch.rand(1, 3, *size, dtype=torch.float64))


def test_norms_get_tokens_and_convolutions_what_they_get_in_a_whole_run():
    module, image = Blocks().eval().requires_grad_(False), torch.rand(1, 3, 24, 10)
    program, given, plain = program_of(module, image), [], F.layer_norm

    def noted(x, *rest, **more):
        given.append(x.is_contiguous())
        return plain(x, *rest, **more)

    whole = convolved_orders(lambda: module(image))
    with mock.patch.object(F, "layer_norm", noted):
        module(image)
    # The first of each group reads a convolution's result, and the rest what that was added to.
    assert given == [False] * 4
    laid = {
        index: step
        for index, step in program.steps.items()
        if index in contiguous_sums(program.graph)
    }
    found = []

    def watched(run):
        def noting(span, pieces, wholes):
            rows = run(span, pieces, wholes)
            found.append(rows.is_contiguous())
            return rows

        return noting

    for index, step in laid.items():
        object.__setattr__(step, "run", watched(step.run))
        over = {one: watched(run) for one, run in step.in_place_runs.items()}
        object.__setattr__(step, "in_place_runs", over)
        program.steps[index] = step
    streamed = convolved_orders(lambda: by_bands(program, image, 4))
    assert streamed.keys() == whole.keys()
    assert set().union(*streamed.values()) == {(1, 2, 3)}
    assert len(found) >= 4 * len(laid)
    assert all(found)


@pytest.mark.parametrize("parts", [1, 4])
def test_images_of_normalized_tokens_keep_their_channels_together(parts):
    module, image = Parallel().eval().requires_grad_(False), torch.rand(1, 3, 24, 10)
    parallel = {one.weight.data_ptr() for pair in module.parallel for one in (pair[0], pair[2])}
    whole = convolved_orders(lambda: module(image))
    assert {key for key, orders in whole.items() if orders == {(2, 3, 1)}} == parallel
    program = program_of(module, image)
    streamed = convolved_orders(lambda: by_bands(program, image, 4, parts))
    assert {key for key, orders in streamed.items() if orders == {(2, 3, 1)}} == parallel
    assert all(orders == {(1, 2, 3)} for key, orders in streamed.items() if key not in parallel)
