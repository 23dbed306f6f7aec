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
    """Operators with arguments by position of their nodes, and results.

    Without copies in the same order, which captured graphs drop unless they are results: PyTorch
    2.8 keeps a dropout's.
    """
    for node in exported.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default):
        given = node.args[0]
        same = not node.kwargs and node.meta["val"].stride() == given.meta["val"].stride()
        if same and not any(user.op == "output" for user in node.users):
            node.replace_all_uses_with(given)
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
        lambda x: x.movedim(1, -1).unflatten(2, (2, 4)).swapaxes(0, 1) + 1,
        lambda x: (x.narrow(2, 1, 4) * x.mT.mT[:, :, 2:]).movedim((1, 2), (2, 1)),
        lambda x: F.pixel_shuffle(x.movedim(1, 1) * 2, 2).diagonal(0, 2, 3),
    ],
)
def test_functional_graphs_are_rewritten(compute):
    fast, slow = exported_twice(compute)
    assert functional_graph(fast) is fast
    assert calls(fast) == calls(slow.run_decompositions({}))


def mask_by_slices(x):
    mask = torch.zeros(1, 6, 8)
    for number, rows in enumerate((slice(0, 2), slice(2, 5), slice(5, None))):
        mask[:, rows, 1:6] = number
    return x * mask


def reads_between_writes(x):
    total = x * 2
    part = total[:, 1]
    before = part + 1
    part.mul_(3)
    total[:, 2].add_(part)
    after = total.reshape(-1)[::2] + 0
    total[:, 1, 2:4] = before[:, :2]
    return before.sum() + after.sum() + total * part


def seen_through_unsqueeze(x):
    table = torch.ones(3, 4)
    table.unsqueeze(0)[:, 1].div_(4)
    table.unsqueeze(0).mul_(2)
    return x.sum() * table


def by_index(x):
    counts = x.flatten(1) * 1
    counts[0].index_put_((torch.arange(2) * 2,), x.sum())
    return counts


WRITTEN = [
    lambda x: (x + 1).relu_(),
    lambda x: F.leaky_relu(F.relu(x * 2, inplace=True) - 1, inplace=True).add_(x).sub_(1),
    lambda x: F.softmax(x.add(1).transpose(1, 3).contiguous().clamp_(0, 1), -1),
    mask_by_slices,
    reads_between_writes,
    seen_through_unsqueeze,
    by_index,
]


def results_of(exported, image):
    """The result for an image; PyTorch 2.8 makes constants of numbers that are written."""
    constants = exported.graph_signature.inputs_to_lifted_tensor_constants.values()
    given = [exported.constants[name] for name in constants]
    return torch.fx.Interpreter(exported.graph_module, graph=exported.graph).run(*given, image)[-1]


@pytest.mark.parametrize("compute", WRITTEN)
def test_writes_into_tensors_of_the_graph_are_replaced(compute):
    image = torch.rand(1, 4, 6, 8)
    found, _ = exported_twice(compute)
    assert functional_graph(found) is found
    assert not any(
        getattr(node.target, "_schema", None) and node.target._schema.is_mutable
        for node in found.graph.nodes
    )
    assert found.graph_signature.user_outputs == (found.graph.output_node().args[0][0].name,)
    assert torch.equal(results_of(found, image), compute(image.clone()))


def test_composite_operators_stay():
    fast, slow = exported_twice(
        lambda x: torch.einsum("bchw,bcij->bhwij", x, x) * x.var(-1, False).sum()
    )
    assert functional_graph(fast) is fast
    assert calls(fast) == calls(slow.run_decompositions({}))


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x.square() + x.mT.mT,
        lambda x: x.cpu() + x,
        lambda x: (x * 2).transpose(1, 2).relu_() + x.transpose(1, 2),
        lambda x: x.add_(1) * 2,
    ],
)
def test_others_are_traced(compute):
    once, again = exported_twice(compute)
    assert calls(functional_graph(once)) == calls(again.run_decompositions({}))


def test_a_result_that_changes_nothing_stays():
    fast, _ = exported_twice(lambda x: F.dropout(x + 1, 0.5, False))
    assert functional_graph(fast) is fast
    names = [one[0] for one in calls(fast)]
    assert names == ["aten.add.Tensor", "aten.clone.default"]
