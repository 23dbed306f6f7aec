"""Blocks: modules that are run as they are, on bands with the rows around them that they see."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lowtide.streaming.bands.block import Block
from lowtide.streaming.bands.graph import Node
from lowtide.streaming.bands.known_block import KnownBlock
from lowtide.streaming.bands.rows import Needs, RowOp, Rows
from lowtide.streaming.bands.rules.rule import Rule, Tracked
from lowtide.streaming.bands.spans import Span


def whole_module(node: Node, tracked: Tracked) -> RowOp | None:
    """A module whose reach is known, or that tells its rows."""
    rows, block, given = tracked.of(node.args[0]), node.target, tracked.like(node.args[0])
    if rows is None or rows.dim != 2:
        return None
    assert isinstance(block, (Block, KnownBlock))
    width = given.shape[3]

    def needed(span: Span) -> Needs:
        return ([block.seen(span, rows.size, width)],)

    def run(span: Span, pieces: Sequence[Tensor], whole: Sequence[Tensor]) -> Tensor:
        return block.band(pieces[0], span, rows.size)

    inputs = (node.args[0].node,)
    if isinstance(block, KnownBlock):
        return RowOp(
            Rows(2, rows.size, block.grain(rows.size, width)),
            inputs,
            (),
            needed,
            run,
            scratch_bytes=block.work_bytes(*given.shape[1:]),
        )
    beside = block.work_bytes * given.count - node.like.bytes
    return RowOp(
        Rows(2, node.like.shape[2]),
        inputs,
        (),
        needed,
        run,
        scratch=max(0.0, beside / (given.bytes + node.like.bytes)),
    )


RULES: dict[str, Rule] = {"block": whole_module}
