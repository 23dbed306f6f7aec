"""Networks that ncnn runs on the CPU."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from lowtide.core.errors import ModelError, OutOfMemoryError
from lowtide.models.ncnn_graph import INPUT, OUTPUT, NcnnGraph


class NcnnNetwork:
    """A network of ncnn, as a function of (B, C, H, W) in float32, computed in fp32.

    Results differ from PyTorch's by the order of sums: at most 1e-5 of values in 0..1.

    Raises:
        ModelError: ncnn does not take the graph.
    """

    def __init__(self, graph: NcnnGraph, threads: int = 1) -> None:
        ncnn: Any = importlib.import_module("ncnn")
        self._ncnn, self._weights = ncnn, graph.weights  # which ncnn does not copy
        net = ncnn.Net()
        net.opt.num_threads = threads
        for name in ("fp16_packed", "fp16_storage", "fp16_arithmetic", "bf16_storage"):
            setattr(net.opt, f"use_{name}", False)
        if net.load_param_mem(graph.param) != 0:
            raise ModelError("ncnn does not know all layers of this network")
        net.load_model_mem(graph.weights)
        self._net = net

    def __call__(self, images: np.ndarray, **more: np.ndarray) -> np.ndarray:
        """Map (B, C, H, W) to (B, C, H·s, W·s); ``more`` are inputs (C, H, W) of all images.

        Raises `OutOfMemoryError`.
        """
        return np.stack([self._run({INPUT: one, **more}) for one in images])

    def _run(self, inputs: dict[str, np.ndarray]) -> np.ndarray:
        extractor = self._net.create_extractor()
        # Kept until the result is there: ncnn reads from them.
        given = {name: np.ascontiguousarray(one, np.float32) for name, one in inputs.items()}
        for name, one in given.items():
            extractor.input(name, self._ncnn.Mat(one))
        status, result = extractor.extract(OUTPUT)
        if status != 0:
            raise OutOfMemoryError("ncnn could not run the network: memory ran out")
        return np.array(result)
