"""Blocks: modules that are run as they are, on bands with the rows around them that they see."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lowtide.streaming.bands.block import Block
from lowtide.streaming.bands.graph import Node
from lowtide.streaming.bands.rows import Needs, RowOp, Rows
from lowtide.streaming.bands.rules.rule import Rule, Tracked
from lowtide.streaming.bands.spans import Span


def whole_module(node: Node, tracked: Tracked) -> RowOp | None:
    """A module whose reach is known."""
    rows, block, given = tracked.of(node.args[0]), node.target, tracked.like(node.args[0])
    if rows is None or rows.dim != 2:
        return None
    assert isinstance(block, Block)

    def needed(span: Span) -> Needs:
        return ([block.seen(span, rows.size)],)

    def run(span: Span, pieces: Sequence[Tensor], whole: Sequence[Tensor]) -> Tensor:
        return block.band(pieces[0], span, rows.size)

    beside = block.work_bytes * given.count - node.like.bytes
    return RowOp(
        Rows(2, node.like.shape[2]), (node.args[0].node,), (), needed, run,
        scratch=max(0.0, beside / (given.bytes + node.like.bytes)),
    )  # fmt: skip


RULES: dict[str, Rule] = {"block": whole_module}
