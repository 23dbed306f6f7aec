"""ParagonConv as an ncnn graph: the same layers as `paragon_conv`, without PyTorch."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from lowtide.models.ncnn_graph import INPUT, NcnnGraph, NcnnGraphBuilder
from lowtide.models.paragonsr2.config import LEAKY_SLOPE, ParagonConvConfig
from lowtide.models.resample import CUBIC_REACH, cubic_kernel


def paragon_conv_graph(config: ParagonConvConfig, tensors: Mapping[str, np.ndarray]) -> NcnnGraph:
    """Return the graph of a `ParagonConv` with these tensors, by their names in its file."""
    graph = NcnnGraphBuilder(config.channels)

    def conv(x: str, name: str, slope: float | None = LEAKY_SLOPE) -> str:
        weight, bias = (tensors[f"{name}.{one}"] for one in ("weight", "bias"))
        return graph.conv(x, weight, bias, padding=1, leaky_slope=slope)

    detail = conv(INPUT, "conv_in")
    for number in range(config.blocks):
        detail = conv(detail, f"body.{number}")
    detail = conv(detail, "conv_up", None)
    padded = graph.replicate_pad(INPUT, CUBIC_REACH)
    base = graph.conv(padded, cubic_kernel(config.scale, config.channels))
    return graph.build(graph.pixel_shuffle(graph.add(detail, base), config.scale))
