"""Planning on a CPU: what it leaves is left free by the plan, and what it takes is said first."""

import warnings

import pytest
import torch
from subprocess_run import measure_in_subprocess

import lowtide
from lowtide.core.units import MIB
from lowtide.streaming.capture.export_graph import capture_graph
from lowtide.streaming.planning_memory import plan_kept_bytes, whole_run_bytes


@pytest.fixture(scope="module")
def first_call():
    """What others have compiled and loaded in this process would hide what planning takes."""
    return measure_in_subprocess("support.planning_runs:first_call_in_96_mib").result


def test_the_first_call_keeps_the_budget_beside_what_planning_left(first_call):
    assert first_call["peak"] <= 96 * MIB
    assert first_call["layout"] + plan_kept_bytes(first_call["steps"]) <= 0.9 * 96 * MIB
    # It was the budget that ended the search for larger bands.
    assert first_call["layout"] >= 0.4 * 96 * MIB


def test_libraries_of_captures_are_loaded_before_the_first_call(first_call):
    assert not first_call["loaded"]


def test_the_layout_does_not_depend_on_what_the_process_holds():
    model, image = deep_model(), torch.rand(1, 3, 384, 256)
    with torch.no_grad():
        first = lowtide.stream(model, budget="64MiB").prepare(image)
        held = torch.ones(64 * MIB)
        again = lowtide.stream(model, budget="64MiB").prepare(image)
    assert held.nbytes and first.layout == again.layout
    assert "; planning leaves about " in again.title


def deep_model():
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(3, 32, 3, padding=1)]
    for _ in range(10):
        layers += [torch.nn.Conv2d(32, 32, 3, padding=1), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers).eval().requires_grad_(False)


def test_a_layout_that_leaves_no_room_for_planning_says_so_first():
    image = torch.rand(1, 3, 512, 384)
    with pytest.raises(lowtide.BudgetError) as caught:
        lowtide.stream(many_steps(), budget="16MiB").prepare(image)
    assert caught.value.smallest
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the budget that the error names has room for both
        lowtide.stream(many_steps(), budget=caught.value.smallest).prepare(image)
    tight = lowtide.stream(many_steps(), budget=caught.value.smallest - 5 * MIB)
    with pytest.warns(
        UserWarning, match=r"the first call of this Sequential with its planning takes"
    ):
        tight.prepare(image)
    assert torch.allclose(tight(image), many_steps()(image), atol=1e-5)


def many_steps():
    torch.manual_seed(0)
    layers = [layer for _ in range(40) for layer in (torch.nn.Conv2d(3, 3, 1), torch.nn.Tanh())]
    return torch.nn.Sequential(*layers).eval().requires_grad_(False)


def test_a_comparison_that_takes_more_than_the_budget_says_so_first():
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(3, 512, 3, padding=1), torch.nn.Conv2d(512, 512, 3, padding=1)]
    wide = torch.nn.Sequential(*layers).eval().requires_grad_(False)
    small, image = lowtide.stream(wide, budget="32MiB"), torch.rand(1, 3, 32, 24)
    with pytest.warns(UserWarning, match=r"comparing bands of this Sequential .* takes about"):
        small.prepare(image)
    assert torch.allclose(small(image), wide(image), atol=1e-5)


@pytest.mark.parametrize(("height", "width"), [(37, 51), (64, 64)])
def test_bytes_of_a_whole_run_follow_from_the_graph(height, width):
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 1)
    )
    graph = capture_graph(model.eval(), torch.zeros(1, 3, height, width))
    # A map of 8 channels and its ReLU are alive together, more than the ReLU and the result.
    assert whole_run_bytes(graph) == 2 * 8 * height * width * 4


def test_products_that_are_scaled_are_counted():
    """Whose scale a rule makes a constant of its own."""
    net = pytest.importorskip("spandrel.architectures.CRAFT").CRAFT(
        upscale=2, depths=[1], num_heads=[6]
    )
    image = torch.rand(1, 3, 40, 36)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = lowtide.stream(net.eval(), budget="200MiB")(image)
        assert (result - net(image)).abs().max() < 1e-4
