"""FiniteDenoiser as an ncnn graph: the same layers as `finite_denoiser`, without PyTorch."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from lowtide.models.denoiser.config import LEVELS, FiniteDenoiserConfig
from lowtide.models.ncnn_graph import INPUT, NcnnGraph, NcnnGraphBuilder

PLANES = "in1"  # six planes of levels, at half the picture's size
_EPSILON = 1e-6


def finite_denoiser_graph(
    config: FiniteDenoiserConfig, tensors: Mapping[str, np.ndarray]
) -> NcnnGraph:
    """Return the graph of a `FiniteUNet` with these tensors, by their names in the file.

    It maps noisy (3, H, W) in -0.5..0.5 and `PLANES` to the noise in shares of the strongest level.
    """
    return _GraphWriter(tensors).write(config)


class _GraphWriter:
    """Writes the U-Net's parts, by the names of their tensors."""

    def __init__(self, tensors: Mapping[str, np.ndarray]) -> None:
        self._tensors, self._graph = tensors, NcnnGraphBuilder(3)

    def write(self, config: FiniteDenoiserConfig) -> NcnnGraph:
        graph, lowest = self._graph, len(config.blocks) - 1
        planes = graph.input(PLANES, LEVELS, 1 / 4)
        halves = graph.pixel_unshuffle(INPUT, 2)
        y, passed = self._conv(graph.concatenate(halves, planes), "head", padding=1), []
        for level in range(lowest):
            y = self._blocks(y, f"encoder.{level}", config.blocks[level])
            passed.append(y)
            y = self._conv(y, f"down.{level}", stride=2)
        y = self._blocks(y, f"encoder.{lowest}", config.blocks[lowest])
        for level in reversed(range(lowest)):
            y = graph.add(graph.pixel_shuffle(self._conv(y, f"up.{level}"), 2), passed.pop())
            y = self._blocks(y, f"decoder.{level}", config.blocks[level])
        y = graph.pixel_shuffle(self._conv(y, "leave"), 2)
        y = graph.concatenate(y, self._conv(INPUT, "full_in", padding=1))
        return graph.build(self._conv(y, "tail", padding=1))

    def _tensor(self, name: str) -> np.ndarray:
        return self._tensors[f"unet.{name}"].astype(np.float32)  # files may be in fp16

    def _conv(self, x: str, name: str, *, padding: int = 0, stride: int = 1) -> str:
        weight, bias = self._tensor(f"{name}.weight"), self._tensor(f"{name}.bias")
        return self._graph.conv(x, weight, bias, padding=padding, stride=stride)

    def _blocks(self, x: str, name: str, count: int) -> str:
        for number in range(count):
            x = self._half(x, f"{name}.{number}", "1", depthwise=True)
            x = self._half(x, f"{name}.{number}", "2", depthwise=False)
        return x

    def _half(self, x: str, name: str, which: str, *, depthwise: bool) -> str:
        """Write a residual step; factors of norms and steps are in the convolutions beside them."""
        graph = self._graph
        gain, shift = (self._tensor(f"{name}.norm{which}.{one}") for one in ("weight", "bias"))
        weight, bias = (self._tensor(f"{name}.expand{which}.{one}") for one in ("weight", "bias"))
        normed = graph.channel_norm(x, len(gain), _EPSILON)
        wide = graph.conv(
            normed, weight * gain[None, :, None, None], bias + weight[:, :, 0, 0] @ shift
        )
        if depthwise:
            kernel, offset = (self._tensor(f"{name}.depthwise.{one}") for one in ("weight", "bias"))
            wide = graph.conv(wide, kernel, offset, padding=1, depthwise=True)
        gated = graph.multiply(*graph.halves(wide))
        scale = self._tensor(f"{name}.scale{which}")
        weight, bias = (self._tensor(f"{name}.project{which}.{one}") for one in ("weight", "bias"))
        step = graph.conv(gated, weight * scale.reshape(-1, 1, 1, 1), bias * scale.ravel())
        return graph.add(x, step)
