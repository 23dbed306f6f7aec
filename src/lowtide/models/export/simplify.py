"""A graph that was just exported, without what is computed from constants or twice."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir

# Constants are folded, and with what they were folded to others can be.
_ROUNDS = 2
# Weights that are only laid out anew are larger than what is folded unless asked for.
_LARGEST_FOLDED = 1 << 26  # numbers


def simplify(graph: onnx_ir.Model) -> None:
    """Fold constants, drop what nothing reads and what is there twice; in place, same results.
    And drop the notes on where in which file of this machine each operator comes from.

    What the exporter's own optimizer does, but for its search for patterns of operators to be
    written as one: that takes time with the square of their number, half an hour for the deepest
    networks, and runtimes have their own when they load a file.
    """
    import onnx_ir.passes.common as common
    from onnx_ir.passes import PassManager, Sequential
    from onnxscript.optimizer import fold_constants

    common.InlinePass()(graph)
    clean = PassManager(
        [
            common.RemoveUnusedNodesPass(),
            common.RemoveUnusedFunctionsPass(),
            common.RemoveUnusedOpsetsPass(),
        ]
    )
    for _ in range(_ROUNDS):
        fold_constants(
            graph, onnx_shape_inference=True, input_size_limit=_LARGEST_FOLDED,
            output_size_limit=_LARGEST_FOLDED,
        )  # fmt: skip
        clean(graph)
    Sequential(
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.LiftSubgraphInitializersToMainGraphPass(),
        common.DeduplicateInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
        common.ClearMetadataAndDocStringPass(),
        common.OutputFixPass(),
        common.NameFixPass(),
    )(graph)
