"""Constants of a program: results that do not depend on the input, made on demand.

These are biases, masks and indices. A mask for the windows of a whole image is as large as the
attention scores, so it is made band by band, and equal windows share one copy.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from lowtide.attention.window_attention import MaskPattern
from lowtide.streaming.capture.graph import GraphNode
from lowtide.streaming.engine.program import StreamProgram
from lowtide.streaming.rules.pointwise import is_pointwise
from lowtide.streaming.rules.rule import op_name
from lowtide.streaming.spans import Span


class ConstantCache:
    """Cache of a program's constant results on one device; equal grains are shared."""

    def __init__(self, program: StreamProgram) -> None:
        self._program = program
        self._nodes = program.graph.nodes
        self._full_tensors: dict[int, Tensor] = {}
        self._grain_digests: dict[tuple[int, int], list[bytes | None]] = {}
        self._tensor_by_digest: dict[bytes | None, Tensor] = {}
        self._slice_digests: dict[tuple[int, int, int], list[bytes | None]] = {}
        self._pattern_cache: dict[tuple[bytes | None, tuple[int, ...]], MaskPattern] = {}
        # Digests of the model's tensors that the cached grains were made of.
        self._source_digests: dict[int, bytes] = {}
        self._visited = set[int]()

    def refreshed(self) -> ConstantCache:
        """Return self, or new constants if the model's tensors have changed.

        Only tensors that cached grains depend on count.
        """
        tensors = self._program.graph.tensors
        same = all(_digest(tensors[one]) == was for one, was in list(self._source_digests.items()))
        return self if same else type(self)(self._program)

    def full_tensor(self, index: int) -> Tensor:
        """Return a whole constant result; it has the same shape as its node.

        It is cached until `free_full_tensors`.
        """
        if index in self._program.graph.tensors:
            return self._program.graph.tensors[index]
        found = self._full_tensors.get(index)
        if found is None:
            found = self._full_tensors[index] = self._compute(index, {})
        return found

    def rows(self, index: int, dim: int, span: Span, grain: int) -> Tensor:
        """Return a span of a constant along ``dim``, concatenated from cached grains.

        Its shape is that of the node, with the rows of the span along ``dim``, as in (B, C, rows,
        W).

        Args:
            index: Node index of the constant.
            dim: Dim of the rows.
            span: Rows to return.
            grain: Rows per grain.
        """
        size = self._nodes[index].meta.shape[dim]
        known = self._grain_digests.setdefault((index, dim), [None] * -(-size // grain))
        parts = []
        for grain_index in range(span[0] // grain, -(-span[1] // grain)):
            digest = known[grain_index]
            if digest is None:
                place = index, dim, grain_index, grain
                part = self._compute_grain(*place)
                (digest,) = self._digests(part, place, of_slices=False)
                known[grain_index] = digest
                if digest not in self._tensor_by_digest:
                    self._tensor_by_digest[digest] = part.clone(
                        memory_format=torch.contiguous_format
                    )
                del part
            parts.append(self._tensor_by_digest[digest])
        found = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
        start = span[0] // grain * grain
        return found.narrow(dim, span[0] - start, span[1] - span[0])

    def mask_patterns(self, index: int, dim: int, span: Span, grain: int) -> list[MaskPattern]:
        """Return a span of a constant as one `MaskPattern` per distinct value.

        Places of a pattern count from the start of the span; arguments are those of `rows`.
        """
        found: dict[bytes | None, list[int]] = {}
        for grain_index in range(span[0] // grain, -(-span[1] // grain)):
            for at, digest in enumerate(
                self._cached_slice_digests(index, dim, grain_index, grain), grain_index * grain
            ):
                if span[0] <= at < span[1]:
                    found.setdefault(digest, []).append(at - span[0])
        return [self._pattern(key, tuple(places)) for key, places in found.items()]

    def _pattern(self, digest: bytes | None, places: tuple[int, ...]) -> MaskPattern:
        """Return the pattern, the same object for equal windows of all layers and bands."""
        if (digest, places) not in self._pattern_cache:
            added = None if digest is None else self._tensor_by_digest[digest]
            self._pattern_cache[digest, places] = MaskPattern(places, added)
        return self._pattern_cache[digest, places]

    def _cached_slice_digests(
        self, index: int, dim: int, grain_index: int, grain: int
    ) -> list[bytes | None]:
        """Return for each place of a grain the digest of its values; None where all are 0."""
        known = self._slice_digests.get((index, dim, grain_index))
        if known is None:
            place = index, dim, grain_index, grain
            part = self._compute_grain(*place)
            known = self._digests(part, place, of_slices=True)
            self._slice_digests[index, dim, grain_index] = known
            for one, digest in zip(part.unbind(dim), known, strict=True):
                if digest is not None and digest not in self._tensor_by_digest:
                    self._tensor_by_digest[digest] = one.clone(
                        memory_format=torch.contiguous_format
                    )
        return known

    def grain_digests(self, *place: int, of_slices: bool) -> list[bytes | None]:
        """Return the digest of a grain, or of each of its slices, equal for equal values.

        None for slices where all values are 0. ``place`` is node index, dim, number of the grain,
        and rows per grain.
        """
        return self._digests(self._compute_grain(*place), place, of_slices=of_slices)

    def _digests(
        self, part: Tensor, place: tuple[int, ...], *, of_slices: bool
    ) -> list[bytes | None]:
        if not of_slices:
            return [_digest(part)]
        return [_digest(one) if one.any() else None for one in part.unbind(place[1])]

    def free_full_tensors(self) -> None:
        """Free whole results, which can be made again."""
        self._full_tensors = {}

    def _compute_grain(self, index: int, dim: int, grain_index: int, grain: int) -> Tensor:
        self._record_sources(index)
        size = self._nodes[index].meta.shape[dim]
        return self._compute_span(
            index, dim, (grain_index * grain, min(size, (grain_index + 1) * grain)), {}
        )

    def _record_sources(self, index: int) -> None:
        """Record digests of the model's tensors that a result depends on."""
        waiting, tensors = [index], self._program.graph.tensors
        while waiting:
            one = waiting.pop()
            if one in self._visited:
                continue
            self._visited.add(one)
            if one in tensors:
                self._source_digests[one] = _digest(tensors[one])
            waiting += self._nodes[one].refs

    def _compute(self, index: int, computed: dict[int, Tensor]) -> Tensor:
        """Compute a whole result; ``computed`` caches intermediate results for the caller."""
        if index in self._program.graph.tensors:
            return self._program.graph.tensors[index]
        if (found := self._full_tensors.get(index)) is not None:
            return found
        if index not in computed:
            computed[index] = self._nodes[index].call(lambda one: self._compute(one, computed))
        return computed[index]

    def _compute_span(
        self, index: int, dim: int, span: Span, computed: dict[int, Tensor]
    ) -> Tensor:
        """Compute a span along ``dim`` without materializing broadcast dims of the rest."""
        node = self._nodes[index]
        if node.kind == "call" and is_pointwise(node):
            return self._compute_pointwise_span(node, dim, span, computed)
        if node.kind == "call" and op_name(node.target) == "unsqueeze":
            unsqueezed_dim = node.args[1] % len(node.meta.shape)
            if unsqueezed_dim != dim:
                input_dim = dim if unsqueezed_dim > dim else dim - 1
                return self._compute_span(node.args[0].node, input_dim, span, computed).unsqueeze(
                    unsqueezed_dim
                )
        return self._compute(index, computed).narrow(dim, span[0], span[1] - span[0])

    def _compute_pointwise_span(
        self, node: GraphNode, dim: int, span: Span, computed: dict[int, Tensor]
    ) -> Tensor:
        """Compute a span of a pointwise node, slicing only operands that have the dim."""
        rank, size = len(node.meta.shape), node.meta.shape[dim]

        def value(one: int) -> Tensor:
            shape = self._nodes[one].meta.shape
            at = dim - rank + len(shape)
            if at >= 0 and shape[at] == size > 1:
                return self._compute_span(one, at, span, computed)
            return self._compute(one, computed)

        return node.call(value)


def _digest(part: Tensor) -> bytes:
    """Return a 16-byte BLAKE2b digest of a tensor's dtype, shape and values."""
    plain = part.detach().contiguous()
    content = plain.cpu().view(torch.uint8) if plain.dim() else plain.cpu()
    facts = f"{plain.dtype} {tuple(plain.shape)}".encode()
    return hashlib.blake2b(content.numpy().tobytes() + facts, digest_size=16).digest()
