"""A spatial module as an ONNX file, for images of any size."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
from torch import nn

from lowtide.attention.spatial.onnx_graph import write_graph
from lowtide.core.errors import UsageError

# The first with the Attention operator, and the last in which the exporter spells it out.
ATTENTION_OPSET, PLAIN_OPSET = 23, 20


def export_onnx(
    module: nn.Module,
    path: Path | str,
    *,
    channels: int,
    opset: int = ATTENTION_OPSET,
    height: tuple[int, int] | None = None,
    width: tuple[int, int] | None = None,
) -> None:
    """Write ``module`` to ``path``: from ``image`` (batch, ``channels``, height, width) to
    ``result``, all but the channels of any size.

    Opset 23 has an operator for attention, which runtimes fuse; 20 spells it out for older ones.
    ``height`` and ``width`` are the least and most pixels where a module is not the same for all,
    as `HierarchicalAttention`, which can be exported within one of its stages only. Windows are
    taken all at once, so that a runtime holds far more than the module does here. Results differ
    by rounding. Needs the packages ``onnx`` and ``onnxscript``; raises `UsageError` without them.
    """
    for package in ("onnx", "onnxscript"):
        if importlib.util.find_spec(package) is None:
            raise UsageError(
                f"writing ONNX files needs {package}", hint="pip install 'lowtide[onnx]'"
            )
    free = torch.export.Dim.DYNAMIC
    rows, columns = (
        free if limits is None else torch.export.Dim(name, min=limits[0], max=limits[1])
        for name, limits in (("height", height), ("width", width))
    )
    sides = (41 if height is None else height[0], 37 if width is None else width[0])
    example = next(module.parameters()).new_zeros(2, channels, *(max(side, 2) for side in sides))
    was_training = module.training
    try:
        write_graph(
            module.eval(), example, path, opset=opset, shapes={0: free, 2: rows, 3: columns}
        )
    finally:
        module.train(was_training)
