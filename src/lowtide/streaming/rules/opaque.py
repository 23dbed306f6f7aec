"""Rule of opaque modules, run as they are on bands with their halo."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lowtide.streaming.capture.graph import Node
from lowtide.streaming.capture.opaque_module import OpaqueModule
from lowtide.streaming.capture.region_module import RegionModule
from lowtide.streaming.rules.row_op import Needs, RowAxis, RowOp
from lowtide.streaming.rules.rule import Rule, RuleContext
from lowtide.streaming.spans import Span


def whole_module(node: Node, tracked: RuleContext) -> RowOp | None:
    """Lower an `OpaqueModule` or a `RegionModule` to a band with its halo."""
    rows, block, given = tracked.of(node.args[0]), node.target, tracked.like(node.args[0])
    if rows is None or rows.dim != 2:
        return None
    assert isinstance(block, (OpaqueModule, RegionModule))
    width = given.shape[3]

    def needed(span: Span) -> Needs:
        return ([block.seen(span, rows.size, width)],)

    def run(span: Span, pieces: Sequence[Tensor], whole: Sequence[Tensor]) -> Tensor:
        return block.band(pieces[0], span, rows.size)

    inputs = (node.args[0].node,)
    if isinstance(block, RegionModule):
        return RowOp(
            RowAxis(2, rows.size, block.grain(rows.size, width)),
            inputs,
            (),
            needed,
            run,
            scratch_bytes=block.work_bytes(*given.shape[1:]),
        )
    beside = block.work_bytes * given.count - node.like.bytes
    return RowOp(
        RowAxis(2, node.like.shape[2]),
        inputs,
        (),
        needed,
        run,
        scratch=max(0.0, beside / (given.bytes + node.like.bytes)),
    )


RULES: dict[str, Rule] = {"block": whole_module}
