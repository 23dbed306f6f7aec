"""One graph of a module for images of any size, written as an ONNX file."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lowtide.core.logging import silence_warnings

if TYPE_CHECKING:
    import onnx_ir

IMAGE, RESULT = "image", "result"
# Weights that are only laid out anew are larger than what is folded unless asked for.
_LARGEST_FOLDED = 1 << 26  # numbers


def write_graph(
    module: nn.Module,
    image: Tensor,
    path: Path | str,
    *,
    opset: int,
    shapes: dict[int, Any],
    tell: Callable[[str], None] = lambda step: None,
) -> None:
    """Write ``module`` to ``path``: from ``image`` to ``result``, whose dimensions are free as
    ``shapes`` says (by `torch.export.Dim`). ``tell`` is told each step."""
    tell("tracing the model; a deep one takes minutes")
    # The exporter and its optimizer talk about their own affairs.
    with silence_warnings("onnxscript"), silence_warnings("torch.onnx"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            module,
            (image,),
            None,
            dynamo=True,
            opset_version=opset,
            verbose=False,
            input_names=[IMAGE],
            output_names=[RESULT],
            dynamic_shapes=(shapes,),
            optimize=False,
        )
        assert program is not None  # None is for the exporter that came before
        tell(f"simplifying a graph of {program.model.graph.num_nodes():,} operators")
        simplify(program.model)
        program.save(path, external_data=False)


def simplify(graph: onnx_ir.Model) -> None:
    """Fold constants, drop what nothing reads, what is there twice, and the notes on which line of
    which file each operator comes from; in place, same results.

    What the exporter's own optimizer does, but for its search for patterns of operators to be
    written as one: that takes time with the square of their number, half an hour for the deepest
    networks, and runtimes have their own when they load a file.
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
