"""Graphs that are not traced a second time are those that the second trace makes."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lowtide.streaming.capture.functional_graph import functional_graph


class Drawn(nn.Module):
    """A module of one of the functions below."""

    def __init__(self, compute):
        super().__init__()
        self.compute = compute

    def forward(self, image):
        return self.compute(image)


def calls(exported):
    """Operators with arguments by position of their nodes, and results."""
    exported.graph.eliminate_dead_code()
    places = {node: f"%{place}" for place, node in enumerate(exported.graph.nodes)}
    found = []
    for node in exported.graph.nodes:
        if node.op == "call_function" and "assert" not in str(node.target):
            args = torch.fx.node.map_arg((node.args, node.kwargs), places.__getitem__)
            value = node.meta["val"]
            found.append((str(node.target), str(args), tuple(value.shape), value.stride()))
    return found


def exported_twice(compute):
    image = torch.rand(1, 4, 6, 8)
    with torch.no_grad():
        module = Drawn(compute).eval()
        return [torch.export.export(module, (image,), strict=False) for _ in range(2)]


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: F.normalize(x, dim=1).reshape(1, 4, -1) * 2,
        lambda x: x.transpose(1, 2).reshape(-1, 8).float() + 1,
        lambda x: F.dropout(x, 0.5, False).flatten(2) + x.contiguous().flatten(2),
        lambda x: F.silu(x.transpose(1, 3).contiguous()).to(torch.float64),
        lambda x: F.interpolate(F.pad(x, (1, 1, 0, 2)), scale_factor=2.0, mode="nearest-exact"),
    ],
)
def test_functional_graphs_are_rewritten(compute):
    fast, slow = exported_twice(compute)
    assert functional_graph(fast) is fast
    assert calls(fast) == calls(slow.run_decompositions({}))


@pytest.mark.parametrize(
    "compute", [lambda x: (x + 1).relu_(), lambda x: x.square() + x.mT.mT, lambda x: x.cpu() + x]
)
def test_others_are_traced(compute):
    once, again = exported_twice(compute)
    assert calls(functional_graph(once)) == calls(again.run_decompositions({}))


def test_a_result_that_changes_nothing_stays():
    fast, _ = exported_twice(lambda x: F.dropout(x + 1, 0.5, False))
    assert functional_graph(fast) is fast
    names = [one[0] for one in calls(fast)]
    assert names == ["aten.add.Tensor", "aten.clone.default"]
