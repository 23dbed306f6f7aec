"""Captured graphs that a later process reads instead of capturing again."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from spandrel.architectures.Compact.__arch.SRVGG import SRVGGNetCompact
from torch import nn

from lowtide.streaming.capture.export_graph import capture_graph
from lowtide.streaming.capture.graph_json import (
    NotSerializableError,
    graph_from_json,
    graph_to_json,
)
from lowtide.streaming.engine.program import lower_to_rows
from lowtide.streaming.planner.program_cache import GraphStore, StreamPlannerCache
from support.band_runs import by_bands, program_of
from support.toy_models import conv_net, network


class ManyKinds(nn.Module):
    """Buffers, constants, results of which one is used, attributes that it sets, odd arguments."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.back = nn.Conv2d(8, 3, 3, padding=1)
        self.register_buffer("shift", torch.rand(1, 8, 1, 1))
        self.mean = torch.tensor([0.4, 0.5, 0.6]).view(1, 3, 1, 1)
        self.requires_grad_(False)

    def forward(self, x):
        self.height = x.shape[2]
        x = self.conv(x - self.mean).to(torch.float64).clamp(min=-float("inf"))
        strongest, _ = x.max(1, keepdim=True)
        x = torch.cat((x[:, :7], strongest), 1).float() + self.shift
        x = nn.functional.pad(x, (1, 1, 1, 1), mode="reflect")[..., 1:-1, 1:-1]
        return self.back(x.roll((2,), (3,))) + self.mean


def stored_and_read(module, image):
    """The graph of a module, and the same through JSON."""
    graph = capture_graph(module, image)
    return graph, graph_from_json(json.loads(json.dumps(graph_to_json(graph, module))), module)


def test_a_graph_read_back_is_the_captured_one():
    module, image = ManyKinds().eval(), torch.rand(1, 3, 37, 29)
    graph, read = stored_and_read(module, image)
    assert read.nodes == graph.nodes
    assert read.written_attributes == graph.written_attributes == {(id(module), "height")}
    assert lower_to_rows(read).digest == lower_to_rows(graph).digest
    assert any(tensor is module.conv.weight for tensor in read.tensors.values())


def test_bands_of_a_graph_read_back_give_the_same_bits():
    module, image = ManyKinds().eval(), torch.rand(1, 3, 37, 29)
    first, read = (
        by_bands(lower_to_rows(graph), image, 4) for graph in stored_and_read(module, image)
    )
    torch.testing.assert_close(read, first, rtol=0, atol=0)
    torch.testing.assert_close(read, module(image))


class InNumpy(nn.Module):
    """Cannot be captured: runs as one operator."""

    def forward(self, x):
        return torch.from_numpy(np.square(x.numpy()))


def test_a_graph_with_a_module_as_an_operator_is_not_described():
    module = nn.Sequential(nn.Conv2d(3, 3, 1), InNumpy()).eval().requires_grad_(False)
    with pytest.raises(NotSerializableError):
        graph_to_json(capture_graph(module, torch.rand(1, 3, 16, 16)), module)


def test_weights_that_are_not_there_are_refused():
    module = conv_net()
    stored = graph_to_json(capture_graph(module, torch.rand(1, 3, 16, 16)), module)
    with pytest.raises(NotSerializableError):
        graph_from_json(stored, nn.Conv2d(3, 3, 1))


@pytest.fixture
def captures(monkeypatch, tmp_path):
    """A function that makes programs as a process does, and how often these captured a graph."""
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    made = []

    def program(module, identity="weights", size=(24, 40)):
        net = network(module, scale=2)
        begun = []
        program = StreamPlannerCache(net, lambda: begun.append(1), identity=identity).program(*size)
        made.append(len(begun))
        return program

    program.made = made
    return program


def compact():
    torch.manual_seed(0)
    net = SRVGGNetCompact(num_feat=8, num_conv=2, upscale=2).eval()
    return net.requires_grad_(False)


def test_a_later_process_reads_the_graph(captures):
    first, later = captures(compact()), captures(compact())
    assert captures.made == [1, 0]
    assert later.digest == first.digest


def test_another_size_model_or_structure_has_a_graph_of_its_own(captures):
    captures(compact())
    captures(compact(), size=(24, 41))
    captures(compact(), identity="other weights")
    wide = SRVGGNetCompact(num_feat=16, num_conv=2, upscale=2).eval().requires_grad_(False)
    captures(wide)
    assert captures.made == [1, 1, 1, 1]


def test_a_damaged_file_is_replaced(captures, tmp_path):
    captures(compact())
    (file,) = tmp_path.glob("plans/graph-*")
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    captures(compact())
    captures(compact())
    assert captures.made == [1, 1, 0]


def test_code_outside_of_packages_is_not_stored(captures, tmp_path):
    class Local(nn.Sequential):
        """Of a test file, which may change without a version."""

    captures(Local(compact()).eval())
    assert not list(tmp_path.glob("plans/graph-*"))


def test_a_proof_begins_only_where_it_is_not_stored(captures, tmp_path):
    net, begun = network(compact(), scale=2), []
    for _ in range(2):
        programs = StreamPlannerCache(net, lambda: begun.append(1), identity="weights")
        assert programs.certificate(24, 40).error < 1e-5
    assert begun == [1]


def test_a_store_needs_no_class_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    module, image = conv_net(scale=1), torch.rand(1, 3, 16, 16)
    store = GraphStore("weights", module)
    assert store.get(image) is None
    store.put(image, capture_graph(module, image))
    assert lower_to_rows(store.get(image)).digest == program_of(module, image).digest
