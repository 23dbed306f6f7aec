"""Constants of a program: results that do not depend on the input, made on demand.

These are biases, masks and indices. A mask for the windows of a whole image is as large as the
attention scores, so it is made band by band, and equal windows share one copy.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from lowtide.attention.window_attention import MaskPattern
from lowtide.streaming.capture.graph import Node
from lowtide.streaming.engine.program import StreamProgram
from lowtide.streaming.rules.pointwise import is_pointwise
from lowtide.streaming.rules.rule import op_name
from lowtide.streaming.spans import Span


class Constants:
    """Cache of a program's constant results on one device; equal grains are shared."""

    def __init__(self, program: StreamProgram) -> None:
        self._program = program
        self._nodes = program.graph.nodes
        self._wholes: dict[int, Tensor] = {}
        self._grains: dict[tuple[int, int], list[bytes | None]] = {}
        self._distinct: dict[bytes, Tensor] = {}
        self._places: dict[tuple[int, int, int], list[bytes | None]] = {}
        self._patterns: dict[tuple[bytes | None, tuple[int, ...]], MaskPattern] = {}
        # Digests of the model's tensors that the cached grains were made of.
        self._made_of: dict[int, bytes] = {}
        self._noted = set[int]()

    def current(self) -> Constants:
        """Return self, or new constants if the model's tensors have changed.

        Only tensors that cached grains depend on count.
        """
        tensors = self._program.graph.tensors
        same = all(_digest(tensors[one]) == was for one, was in list(self._made_of.items()))
        return self if same else type(self)(self._program)

    def whole(self, index: int) -> Tensor:
        """Return a whole constant result; it is cached until `forget`."""
        if index in self._program.graph.tensors:
            return self._program.graph.tensors[index]
        found = self._wholes.get(index)
        if found is None:
            found = self._wholes[index] = self._made(index, {})
        return found

    def rows(self, index: int, dim: int, span: Span, grain: int) -> Tensor:
        """Return a span of a constant along ``dim``, concatenated from cached grains.

        Args:
            index: Node index of the constant.
            dim: Dim of the rows.
            span: Rows to return.
            grain: Rows per grain.
        """
        size = self._nodes[index].like.shape[dim]
        known = self._grains.setdefault((index, dim), [None] * -(-size // grain))
        parts = []
        for place in range(span[0] // grain, -(-span[1] // grain)):
            key = known[place]
            if key is None:
                part = self._grain(index, dim, place, grain)
                key = known[place] = self._key(part, index, dim, place, grain)
                if key not in self._distinct:
                    self._distinct[key] = part.clone(memory_format=torch.contiguous_format)
                del part
            parts.append(self._distinct[key])
        found = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
        start = span[0] // grain * grain
        return found.narrow(dim, span[0] - start, span[1] - span[0])

    def patterns(self, index: int, dim: int, span: Span, grain: int) -> list[MaskPattern]:
        """Return a span of a constant as one `MaskPattern` per distinct value.

        Places of a pattern count from the start of the span; arguments are those of `rows`.
        """
        found: dict[bytes | None, list[int]] = {}
        for place in range(span[0] // grain, -(-span[1] // grain)):
            for at, key in enumerate(self._keys(index, dim, place, grain), place * grain):
                if span[0] <= at < span[1]:
                    found.setdefault(key, []).append(at - span[0])
        return [self._pattern(key, tuple(places)) for key, places in found.items()]

    def _pattern(self, key: bytes | None, places: tuple[int, ...]) -> MaskPattern:
        """Return the pattern, the same object for equal windows of all layers and bands."""
        if (key, places) not in self._patterns:
            added = None if key is None else self._distinct[key]
            self._patterns[key, places] = MaskPattern(places, added)
        return self._patterns[key, places]

    def _keys(self, index: int, dim: int, place: int, grain: int) -> list[bytes | None]:
        """Return for each place of a grain the digest of its values; None where all are 0."""
        known = self._places.get((index, dim, place))
        if known is None:
            part = self._grain(index, dim, place, grain)
            known = self._places[index, dim, place] = self._told(part, index, dim, place, grain)
            for one, key in zip(part.unbind(dim), known, strict=True):
                if key is not None and key not in self._distinct:
                    self._distinct[key] = one.clone(memory_format=torch.contiguous_format)
        return known

    def _told(
        self, part: Tensor, index: int, dim: int, place: int, grain: int
    ) -> list[bytes | None]:
        return [_digest(one) if one.any() else None for one in part.unbind(dim)]

    def told(self, index: int, dim: int, place: int, grain: int) -> list[bytes | None]:
        """Return a digest for each place of a grain, equal for equal values.

        It is None where all values are 0.
        """
        return self._told(self._grain(index, dim, place, grain), index, dim, place, grain)

    def forget(self) -> None:
        """Free whole results, which can be made again."""
        self._wholes = {}

    def key(self, index: int, dim: int, place: int, grain: int) -> bytes:
        """Return a digest of a grain, equal for equal grains."""
        return self._key(self._grain(index, dim, place, grain), index, dim, place, grain)

    def _grain(self, index: int, dim: int, place: int, grain: int) -> Tensor:
        self._note(index)
        size = self._nodes[index].like.shape[dim]
        return self._part(index, dim, (place * grain, min(size, (place + 1) * grain)), {})

    def _note(self, index: int) -> None:
        """Record digests of the model's tensors that a result depends on."""
        waiting, tensors = [index], self._program.graph.tensors
        while waiting:
            one = waiting.pop()
            if one in self._noted:
                continue
            self._noted.add(one)
            if one in tensors:
                self._made_of[one] = _digest(tensors[one])
            waiting += self._nodes[one].refs

    def _key(self, part: Tensor, index: int, dim: int, place: int, grain: int) -> bytes:
        return _digest(part)

    def _made(self, index: int, made: dict[int, Tensor]) -> Tensor:
        """Compute a whole result; ``made`` caches intermediate results for the caller."""
        if index in self._program.graph.tensors:
            return self._program.graph.tensors[index]
        if (found := self._wholes.get(index)) is not None:
            return found
        if index not in made:
            made[index] = self._nodes[index].call(lambda one: self._made(one, made))
        return made[index]

    def _part(self, index: int, dim: int, span: Span, made: dict[int, Tensor]) -> Tensor:
        """Compute a span along ``dim`` without materializing broadcast dims of the rest."""
        node = self._nodes[index]
        if node.kind == "call" and is_pointwise(node):
            return self._pointwise(node, dim, span, made)
        if node.kind == "call" and op_name(node.target) == "unsqueeze":
            at = node.args[1] % len(node.like.shape)
            if at != dim:
                inside = dim if at > dim else dim - 1
                return self._part(node.args[0].node, inside, span, made).unsqueeze(at)
        return self._made(index, made).narrow(dim, span[0], span[1] - span[0])

    def _pointwise(self, node: Node, dim: int, span: Span, made: dict[int, Tensor]) -> Tensor:
        """Compute a span of a pointwise node, slicing only operands that have the dim."""
        rank, size = len(node.like.shape), node.like.shape[dim]

        def value(one: int) -> Tensor:
            shape = self._nodes[one].like.shape
            at = dim - rank + len(shape)
            if at >= 0 and shape[at] == size > 1:
                return self._part(one, at, span, made)
            return self._made(one, made)

        return node.call(value)


def _digest(part: Tensor) -> bytes:
    """Return a 16-byte BLAKE2b digest of a tensor's dtype, shape and values."""
    plain = part.detach().contiguous()
    content = plain.cpu().view(torch.uint8) if plain.dim() else plain.cpu()
    facts = f"{plain.dtype} {tuple(plain.shape)}".encode()
    return hashlib.blake2b(content.numpy().tobytes() + facts, digest_size=16).digest()
