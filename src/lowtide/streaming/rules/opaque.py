"""Rule of opaque modules, run as they are on bands with their halo."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lowtide.streaming.capture.graph import Node
from lowtide.streaming.capture.opaque_module import OpaqueModule
from lowtide.streaming.capture.region_module import RegionModule
from lowtide.streaming.rules.row_op import InputSpans, RowAxis, RowOp
from lowtide.streaming.rules.rule import Rule, RuleContext
from lowtide.streaming.spans import Span


def opaque_module(node: Node, context: RuleContext) -> RowOp | None:
    """Lower an `OpaqueModule` or a `RegionModule` to a band with its halo."""
    rows, block, input_meta = (
        context.row_axis(node.args[0]),
        node.target,
        context.meta(node.args[0]),
    )
    if rows is None or rows.dim != 2:
        return None
    assert isinstance(block, (OpaqueModule, RegionModule))
    width = input_meta.shape[3]

    def needed(span: Span) -> InputSpans:
        return ([block.receptive_field(span, rows.size, width)],)

    def run(span: Span, pieces: Sequence[Tensor], whole: Sequence[Tensor]) -> Tensor:
        return block.run_band(pieces[0], span, rows.size)

    inputs = (node.args[0].node,)
    if isinstance(block, RegionModule):
        return RowOp(
            RowAxis(2, rows.size, block.grain(rows.size, width)),
            inputs,
            (),
            needed,
            run,
            fixed_workspace_bytes=block.workspace_bytes(*input_meta.shape[1:]),
        )
    workspace = block.workspace_per_element * input_meta.numel - node.meta.nbytes
    return RowOp(
        RowAxis(2, node.meta.shape[2]),
        inputs,
        (),
        needed,
        run,
        workspace_share=max(0.0, workspace / (input_meta.nbytes + node.meta.nbytes)),
    )


RULES: dict[str, Rule] = {"block": opaque_module}
