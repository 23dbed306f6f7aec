"""Attention of bands of queries to the whole image, by the backend that is fastest for it."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lowtide.attention.backends import chunked
from lowtide.attention.backends.chunked import OneDnnBackend
from lowtide.attention.functional import resolve_cached
from lowtide.memory.live_peak import live_peak_bytes
from lowtide.streaming.rules.rule import op_name
from support.band_runs import check_parity, program_of


class Attending(nn.Module):
    """Convolutions, and between them attention of each pixel to all, as in an autoencoder."""

    def __init__(self, heads=1, scale=None, value_dim=16):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 3, 3, padding=1)
        self.queries, self.keys = nn.Linear(16, 16), nn.Linear(16, 16)
        self.values, self.out = nn.Linear(16, value_dim), nn.Linear(value_dim, 16)
        self.heads, self.scale = heads, scale

    def forward(self, image):
        x = self.first(image)
        tokens = x.flatten(2).transpose(1, 2)
        query, key, value = (
            layer(tokens).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for layer in (self.queries, self.keys, self.values)
        )
        found = F.scaled_dot_product_attention(query, key, value, scale=self.scale)
        found = self.out(found.transpose(1, 2).flatten(2)).transpose(1, 2)
        return self.last(x + found.view(x.shape))


@pytest.fixture
def pytorchs_kernel(monkeypatch):
    """A processor for which PyTorch's own kernels are taken, whatever this one is."""
    monkeypatch.setattr(chunked, "is_amd", lambda: False)
    resolve_cached.cache_clear()
    yield
    resolve_cached.cache_clear()


def step_of(program):
    (found,) = [
        step
        for index, step in program.steps.items()
        if index < len(program.graph.nodes)
        and op_name(program.graph.nodes[index].target) == "scaled_dot_product_attention"
    ]
    return found


@pytest.mark.parametrize("size", [(24, 23), (31, 29)], ids=str)
@pytest.mark.parametrize("more", [{}, {"heads": 4}, {"scale": 0.7}], ids=str)
def test_onednn_gives_what_the_model_gives(on_amd, more, size):
    image = torch.randn(2, 3, *size)
    with mock.patch.object(
        OneDnnBackend, "run", autospec=True, side_effect=OneDnnBackend.run
    ) as run:
        check_parity(Attending(**more), image, share=2e-6)
    assert more.get("heads", 1) in {call.args[1].shape[1] for call in run.call_args_list}


def test_all_bands_of_an_image_go_the_same_way(on_amd):
    """A band has few queries, for which PyTorch's kernel would be taken."""
    image = torch.randn(1, 3, 24, 23)
    with mock.patch.object(
        OneDnnBackend, "run", autospec=True, side_effect=OneDnnBackend.run
    ) as run:
        check_parity(Attending(), image, bands=(1, 7), parts=(1,), share=2e-6)
    assert min(call.args[1].shape[2] for call in run.call_args_list) < 64


def test_others_stay_with_pytorchs_kernel(on_amd):
    module, image = Attending(), torch.randn(1, 3, 24, 23)
    with mock.patch.object(
        OneDnnBackend, "run", autospec=True, side_effect=OneDnnBackend.run
    ) as run:
        check_parity(module, image[..., :9, :9], share=2e-6)
        check_parity(module.double(), image.double())
    run.assert_not_called()


@pytest.mark.parametrize("heads", [1, 4])
def test_its_memory_is_predicted(on_amd, heads):
    image = torch.randn(1, 3, 40, 50)
    step = step_of(program_of(Attending(heads), image))
    tensors = [torch.randn(1, heads, 2000, 16 // heads) for _ in range(3)]
    piece = tensors[0][:, :, :400].transpose(1, 2).contiguous().transpose(1, 2)
    with torch.no_grad():
        held = live_peak_bytes(lambda: step.run((0, 8), [piece], tensors[1:])) - piece.nbytes
    predicted = step.workspace_bytes(400, piece.nbytes, piece.nbytes)
    assert held <= predicted + 4096
    assert predicted <= 2 * held


class AttendingChannelsFirst(nn.Module):
    """The same of maps as they are: a token's channels lie apart in memory."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, image):
        x = self.first(image)
        tokens = x.flatten(2).transpose(1, 2)[:, None]
        found = F.scaled_dot_product_attention(tokens, tokens, tokens)
        return self.last(x + found[:, 0].transpose(1, 2).view(x.shape))


def test_strided_queries_take_no_memory_for_scores(pytorchs_kernel):
    image = torch.randn(1, 3, 40, 50)
    check_parity(AttendingChannelsFirst(), torch.randn(2, 3, 24, 23), share=2e-6)
    step = step_of(program_of(AttendingChannelsFirst(), image))
    keys = torch.randn(1, 1, 16, 2000).transpose(2, 3)
    with torch.no_grad():
        held = live_peak_bytes(lambda: step.run((0, 8), [keys[:, :, :400]], [keys, keys]))
    assert held < 400 * 2000 * 4  # the scores of this band


def test_scores_are_predicted_where_pytorchs_kernel_keeps_them(pytorchs_kernel):
    module, image = Attending(value_dim=24), torch.randn(1, 3, 40, 50)
    check_parity(module, torch.randn(2, 3, 24, 23), share=2e-6)
    step = step_of(program_of(module, image))
    query, key, value = (torch.randn(1, 1, 2000, width) for width in (16, 16, 24))
    with torch.no_grad():
        held = live_peak_bytes(lambda: step.run((0, 8), [query[:, :, :400]], [key, value]))
    predicted = step.workspace_bytes(400, 400 * 16 * 4, 400 * 24 * 4)
    assert 400 * 2000 * 4 < held <= 1.1 * predicted
    assert predicted <= 2 * held
