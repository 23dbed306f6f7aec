"""Any array along its leading axis, from a source to a sink: volumes, clips, series."""

import numpy as np
import pytest
import torch
from torch import nn

import lowtide
from lowtide import BudgetError, InputError, NotFiniteError, UsageError
from support.toy_models import ArraySink, ArraySource


class Volumes(nn.Module):
    """Slices of two channels to twice as many of three, half as wide."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Conv3d(2, 6, 3, padding=1), nn.GroupNorm(2, 6)
        self.last = nn.Conv3d(6, 3, 3, stride=(1, 1, 2), padding=1)

    def forward(self, x):
        return self.last(nn.functional.silu(self.norm(self.first(x)))).repeat_interleave(2, 2)


def series():
    torch.manual_seed(0)
    last = nn.Conv1d(8, 1, 5, stride=2, padding=2)
    return nn.Sequential(nn.Conv1d(3, 8, 5, padding=2), nn.GELU(), last)


@pytest.mark.parametrize(
    ("module", "shape"), [(Volumes(), (60, 40, 48, 2)), (series(), (100_000, 3))], ids=["3d", "1d"]
)
def test_a_source_is_run_slice_by_slice(module, shape):
    module = module.eval().requires_grad_(False)
    values = np.random.default_rng(0).random(shape, np.float32)
    example = torch.zeros(()).expand(1, shape[-1], *shape[:-1])
    with pytest.raises(BudgetError) as caught:
        lowtide.stream(module, budget="16MiB", axis=2).prepare(example)
    known = lowtide.stream(module, budget=caught.value.smallest, axis=2).prepare(example)
    assert max(known.layout.bands) > 1
    sink = ArraySink()
    known.run_source(ArraySource(values), sink)
    assert len(sink.parts) > 1
    expected = module(torch.from_numpy(values).movedim(-1, 0)[None])[0].movedim(0, -1)
    torch.testing.assert_close(torch.from_numpy(sink.commit()), expected, rtol=0, atol=1e-5)


def test_a_source_that_cannot_be_run_is_named():
    module, early = series().eval().requires_grad_(False), ArraySource(np.zeros((30, 3)))
    known = lowtide.stream(module, axis=2).prepare(torch.zeros(1, 3, 500))
    early.shape = (500, 3)
    with pytest.raises(InputError, match="ended after 30 of 500"):
        known.run_source(early, ArraySink())
    with pytest.raises(NotFiniteError, match="not finite"):
        known.run_source(ArraySource(np.full((500, 3), np.inf)), ArraySink())
    columns = lowtide.stream(Volumes().eval().requires_grad_(False), axis=3)
    with pytest.raises(UsageError, match="along N"):
        columns.prepare(torch.zeros(1, 2, 6, 8, 4)).run_source(
            ArraySource(np.zeros((6, 8, 4, 2))), ArraySink()
        )
