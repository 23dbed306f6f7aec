"""Rule of opaque modules, run as they are on bands with their halo."""

from __future__ import annotations

from lowtide.streaming.capture.graph import GraphNode
from lowtide.streaming.capture.opaque_module import OpaqueModuleOp, RowRegionOp
from lowtide.streaming.rules.rule import LoweringContext, RowAxis, RowOp, Rule, banded_op


def lower_opaque_module(node: GraphNode, context: LoweringContext) -> RowOp | None:
    """Lower a module that is run as it is to a band with its halo."""
    block = node.target
    assert isinstance(block, (OpaqueModuleOp, RowRegionOp))
    rows, meta = context.row_axis(node.args[0]), context.meta(node.args[0])
    if rows is None:
        return None
    if isinstance(block, RowRegionOp):
        return _region_module(node, context, rows, block)
    if rows.dim != block.axis:
        return None
    workspace = block.workspace_per_element * meta.numel - node.meta.nbytes
    return RowOp(
        RowAxis(rows.dim, node.meta.shape[rows.dim]),
        (node.args[0].node,),
        (),
        lambda span: ([block.receptive_field(span, rows.size)],),
        lambda span, pieces, whole: block.run_band(pieces[0], span, rows.size),
        workspace_share=max(0.0, workspace / (meta.nbytes + node.meta.nbytes)),
    )


def _region_module(
    node: GraphNode, context: LoweringContext, rows: RowAxis, block: RowRegionOp
) -> RowOp | None:
    """Lower a module that declares rows of (B, C, H, W); frames may be its batch."""
    if rows.dim == 0:
        return banded_op(node, context, rows)
    shape = node.meta.shape
    if rows.dim != 2:
        return None
    return RowOp(
        RowAxis(2, rows.size, block.grain(rows.size, shape[3])),
        (node.args[0].node,),
        (),
        lambda span: ([block.receptive_field(span, rows.size, shape[3])],),
        lambda span, pieces, whole: block.run_band(pieces[0], span, rows.size),
        fixed_workspace_bytes=block.workspace_bytes(*shape[1:]),
    )


RULES: dict[str, Rule] = {"block": lower_opaque_module}
