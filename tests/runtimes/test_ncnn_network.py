"""Graphs for ncnn compute what the same networks compute in PyTorch."""

import numpy as np
import pytest
import torch

from lowtide.core.errors import ModelError
from lowtide.models.denoiser.config import LEVELS, FiniteDenoiserConfig
from lowtide.models.denoiser.finite_denoiser import FiniteUNet
from lowtide.models.denoiser.finite_denoiser_graph import PLANES, finite_denoiser_graph
from lowtide.models.ncnn_graph import INPUT, NcnnGraph, NcnnGraphBuilder
from lowtide.models.paragonsr2.config import ParagonConvConfig
from lowtide.models.paragonsr2.paragon_conv import ParagonConv
from lowtide.models.paragonsr2.paragon_conv_graph import paragon_conv_graph
from lowtide.runtimes.ncnn_network import NcnnNetwork


def randomized(module):
    """Return the module with weights that let every layer count, and its tensors."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in module.parameters():
            fan_in = weight[0].numel() if weight.dim() > 1 else 4
            weight.copy_(torch.randn(weight.shape, generator=generator) / fan_in**0.5)
    return module.eval(), {name: one.numpy() for name, one in module.state_dict().items()}


@pytest.mark.parametrize("scale", [1, 2, 3, 4])
def test_an_upscaler_equals_pytorch_on_odd_sizes(scale):
    config = ParagonConvConfig(scale, features=24, blocks=2)
    module, tensors = randomized(ParagonConv(config))
    network = NcnnNetwork(paragon_conv_graph(config, tensors))
    for height, width in ((1, 1), (3, 8), (37, 61)):
        images = np.random.default_rng(0).random((2, 3, height, width), np.float32)
        with torch.inference_mode():
            expected = module(torch.from_numpy(images)).numpy()
        assert abs(network(images) - expected).max() < 1e-5


def test_a_denoiser_equals_pytorch():
    config = FiniteDenoiserConfig(features=8, blocks=(1, 2), fine=4)
    module, tensors = randomized(FiniteUNet(config))
    tensors = {f"unet.{name}": one for name, one in tensors.items()}
    network = NcnnNetwork(finite_denoiser_graph(config, tensors))
    image = np.random.default_rng(0).random((1, 3, 28, 36), np.float32) - 0.5
    levels = np.linspace(0.02, 0.4, LEVELS, dtype=np.float32)
    planes = np.broadcast_to(4 * levels[:, None, None], (LEVELS, 14, 18))
    with torch.inference_mode():
        expected = module(torch.from_numpy(image), torch.from_numpy(levels)[None, :, None, None])
    assert abs(network(image, **{PLANES: planes}) - expected.numpy()).max() < 1e-5


def test_a_result_may_be_read_by_many_layers():
    graph = NcnnGraphBuilder(2)
    twice = graph.add(INPUT, INPUT)
    network = NcnnNetwork(graph.build(graph.multiply(graph.add(twice, INPUT), twice)))
    image = np.random.default_rng(0).random((1, 2, 5, 7), np.float32)
    np.testing.assert_allclose(network(image), 6 * image**2, rtol=1e-6)


def test_work_and_sizes_are_those_of_the_layers():
    config = ParagonConvConfig(2, features=24, blocks=1)
    graph = paragon_conv_graph(config, randomized(ParagonConv(config))[1])
    assert graph.multiply_adds == 9 * (3 * 24 + 24 * 24 + 24 * 12) + 25 * 3 * 12
    assert (graph.layer_values, graph.result_values) == (48, 12)


def test_a_graph_of_unknown_layers_is_refused():
    with pytest.raises(ModelError, match="ncnn"):
        NcnnNetwork(NcnnGraph("7767517\n1 1\nNothing a 0 1 in0\n", b"", 0, 0, 0))
