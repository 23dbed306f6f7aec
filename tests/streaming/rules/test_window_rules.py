"""Attention of windows that a model writes out, run as one operator."""

import pytest
import torch

import lowtide
from lowtide.streaming.engine.constants import ConstantCache
from lowtide.streaming.planner.dry_run import trace_stream_run
from lowtide.streaming.planner.layout_search import draft_layouts
from lowtide.streaming.rules.rule import RowOp, op_name
from support.band_runs import check_parity, program_of
from support.stream_models import SIDE, Windows, parted


def operators(program):
    return [
        op_name(program.graph.nodes[index].target)
        for index, step in program.steps.items()
        if isinstance(step, RowOp)
    ]


@pytest.mark.parametrize(
    ("shift", "scale_last", "size"),
    [(0, False, (24, 12)), (2, True, (28, 36)), (2, False, (8, 4)), (0, True, (8, 4))],
)
def test_it_gives_what_the_model_gives(shift, scale_last, size):
    module = Windows(shift=shift, scale_last=scale_last).double()
    image = torch.rand(1, 3, *size, dtype=torch.float64)
    check_parity(module, image)
    assert "softmax" not in operators(program_of(module, image))


def test_small_heads_are_left_as_they_are():
    module = Windows(channels=16, heads=2).double()
    image = torch.rand(1, 3, 24, 12, dtype=torch.float64)
    assert "softmax" in operators(program_of(module, image))
    check_parity(module, image)


def test_scores_that_something_else_reads_are_left_as_they_are():
    class Also(Windows):
        def forward(self, image):
            windows = self.first(image).permute(0, 2, 3, 1)
            inner = parted(windows).view(-1, 1, SIDE**2, windows.shape[-1])
            scores = inner @ (inner * 2).transpose(-2, -1)
            found = scores.softmax(-1) @ (inner + 1) + scores.mean((-2, -1), keepdim=True)
            return found.view(1, image.shape[2] // SIDE, -1)

    image = torch.rand(1, 3, 24, 12, dtype=torch.float64)
    assert "softmax" in operators(program_of(Also().double(), image))


def test_masks_are_kept_as_their_few_patterns():
    image = torch.rand(1, 3, 24, 20)
    program = program_of(Windows(), image)
    (step,) = (
        step for step in program.steps.values() if isinstance(step, RowOp) and step.pattern_dims
    )
    constants, ((index, dim),) = ConstantCache(program), step.pattern_dims.items()
    assert step.rows.grain == 5
    dense = constants.full_tensor(index)
    # The right edge, the lower one, and the corner.
    seen = set()
    for span in ((0, 5), (5, 15), (20, 30), (25, 30)):
        rebuilt = torch.zeros_like(dense.narrow(dim, 0, span[1] - span[0]))
        for pattern in constants.mask_patterns(index, dim, span, 5):
            for place in pattern.windows:
                if pattern.mask is not None:
                    rebuilt.select(dim, place).copy_(pattern.mask)
                    seen.add(id(pattern.mask))
        assert torch.equal(rebuilt, dense.narrow(dim, span[0], span[1] - span[0]))
    assert len(seen) == 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_a_gpu_gives_what_the_model_gives(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    model, image = Windows().eval().cuda(), torch.rand(1, 3, 64, 40, device="cuda")
    with torch.inference_mode():
        expected = model(image)
        found = lowtide.stream(model, budget="1GiB")(image)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_dry_runs_keep_no_scores():
    program = program_of(Windows(), torch.rand(1, 3, 64, 64))
    layout = next(draft_layouts(program, (1 << 20,), ("memory",)))
    names = {op.name for op in trace_stream_run(program, layout, whole_image=True).ops}
    assert any("attention" in name for name in names), names
    assert not any("softmax" in name for name in names), names


def test_equal_windows_of_all_bands_are_one_pattern():
    """So their indices are copied to the GPU once."""
    model = Windows().eval()
    program = program_of(model, torch.rand(1, 3, 32, 24))
    (step,) = (
        step for step in program.steps.values() if isinstance(step, RowOp) and step.pattern_dims
    )
    ((mask, dim),) = step.pattern_dims.items()
    constants = ConstantCache(program)
    windows = 24 // SIDE

    def of(row):
        span = row * windows, (row + 1) * windows
        return constants.mask_patterns(mask, dim, span, step.rows.grain)

    first, second, last = of(0), of(1), of(32 // SIDE - 1)
    assert all(one is other for one, other in zip(first, second, strict=True))
    assert all(one is other for one, other in zip(last, of(32 // SIDE - 1), strict=True))
    assert not any(one is other for one in first for other in last)
    device = torch.device("cpu")
    for one in first:
        assert one.indices(device) is one.indices(device)
        assert one.indices(device).tolist() == list(one.windows)
