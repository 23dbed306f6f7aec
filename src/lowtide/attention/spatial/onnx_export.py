"""ONNX export of spatial attention modules for dynamic image sizes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
from torch import nn

from lowtide.attention.spatial.onnx_graph import write_graph
from lowtide.core.errors import UsageError

# The first opset with the Attention operator, and the last that the exporter decomposes to plain
# operators.
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
    """Export ``module`` to an ONNX file for images of any size.

    The input ``image`` is (B, ``channels``, H, W), the output is ``result``; all dimensions but the
    channels are dynamic. All windows are computed at once, so that a runtime holds far more memory
    than the module does here. Results differ by rounding.

    Args:
        module: the module, which is exported in eval mode.
        path: the ONNX file to write.
        channels: of the input.
        opset: 23 has an attention operator, which runtimes fuse; 20 uses plain operators for older
            runtimes.
        height, width: least and most pixels, for a module that is not the same function for all
            sizes, such as `HierarchicalAttention`, which can be exported within one of its stages
            only.

    Raises:
        UsageError: the packages ``onnx`` and ``onnxscript`` are not installed.
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
