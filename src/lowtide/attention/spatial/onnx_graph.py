"""ONNX export of spatial attention modules for dynamic image sizes: the graph, simplified."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lowtide.core.errors import UsageError, install_extra
from lowtide.core.logging import silence_warnings

if TYPE_CHECKING:
    import onnx_ir

# The first opset with the Attention operator, and the last that the exporter decomposes to plain
# operators.
ATTENTION_OPSET, PLAIN_OPSET = 23, 20

IMAGE, RESULT = "image", "result"
# Constants that are only permuted weights exceed the default size limit of constant folding.
_LARGEST_FOLDED = 1 << 26  # elements


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
            raise UsageError(f"writing ONNX files needs {package}", hint=install_extra("onnx"))
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


def write_graph(
    module: nn.Module,
    image: Tensor,
    path: Path | str,
    *,
    opset: int,
    shapes: dict[int, Any],
    more: Mapping[str, Tensor] | None = None,
    progress: Callable[[str], None] = lambda step: None,
) -> None:
    """Export ``module`` to ``path`` with input ``image`` and output ``result``.

    ``image`` is an example (B, C, H, W), ``shapes`` are its dynamic dimensions, by
    `torch.export.Dim`. ``more`` are further inputs by name, of fixed shapes. ``progress`` is called
    with a message at each step.
    """
    others = dict(more or {})
    progress("tracing the model; a deep one takes minutes")
    # The exporter and its optimizer log internals that do not concern the user.
    with silence_warnings("onnxscript"), silence_warnings("torch.onnx"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            module,
            (image, *others.values()),
            None,
            dynamo=True,
            opset_version=opset,
            verbose=False,
            input_names=[IMAGE, *others],
            output_names=[RESULT],
            dynamic_shapes=(shapes, *({} for _ in others)),
            optimize=False,
        )
        assert program is not None  # only the legacy exporter returns None
        _refuse_draft(program)
        progress(f"simplifying a graph of {program.model.graph.num_nodes():,} operators")
        simplify(program.model)
        program.save(path, external_data=False)


def _refuse_draft(program: torch.onnx.ONNXProgram) -> None:
    """Raise `OnnxExporterError` for a graph that holds for the example alone.

    PyTorch 2.8 makes such a draft where it cannot trace a module; newer ones raise this error.
    """
    if getattr(program, "_capture_strategy", None) == "TorchExportDraftExportStrategy":
        raise torch.onnx.errors.OnnxExporterError(
            "it computes otherwise for other values or sizes, which a file has no guard for"
        )


def simplify(graph: onnx_ir.Model) -> None:
    """Simplify an ONNX graph in place, with the same results.

    Folds constants, and removes unused nodes, duplicates, and metadata about source lines. It does
    what the exporter's own optimizer does, except for its search for fusion patterns: that takes
    quadratic time, half an hour for the deepest networks, and runtimes fuse on their own when they
    load a file.
    """
    import onnx_ir.passes.common as common
    from onnx_ir.passes import Sequential
    from onnxscript.optimizer import fold_constants

    common.InlinePass()(graph)
    fold_constants(
        graph,
        onnx_shape_inference=True,
        input_size_limit=_LARGEST_FOLDED,
        output_size_limit=_LARGEST_FOLDED,
    )
    Sequential(
        common.RemoveUnusedNodesPass(),
        common.RemoveUnusedFunctionsPass(),
        common.RemoveUnusedOpsetsPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.LiftSubgraphInitializersToMainGraphPass(),
        common.DeduplicateInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
        common.ClearMetadataAndDocStringPass(),
        common.OutputFixPass(),
        common.NameFixPass(),
    )(graph)
