"""Attention by oneDNN's products, with all scores of some queries at once."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lowtide.attention.backends.backend import Backend, Missing, scale_of
from lowtide.attention.backends.chunked import SCORES
from lowtide.attention.call import AttentionCall, AttentionSpec, Device
from lowtide.attention.powers import LOG2_E, weighted
from lowtide.attention.products import ONEDNN_LINEAR, has_onednn
from lowtide.core.processor import is_amd
from lowtide.core.stand_in import for_each

# Scores of one head from which it pays, for each thread that shares them: with fewer, threads wait
# for each other too often. PyTorch's kernel shares out heads.
_LEAST_SCORES = 1 << 16


class OneDnn(Backend):
    """Product, powers of two and product of one head after another.

    PyTorch's fused kernel leaves its products to MKL, which takes twice as long on AMD's processors
    with AVX-512, and has small blocks of queries where there are fewer than 768.
    """

    name = "onednn"
    about = "whole rows of scores by oneDNN's products; for AMD processors with AVX-512"
    verified = frozenset({"cpu"})

    def missing(self, device: Device) -> Missing | None:
        """It is for x86 processors, and builds of PyTorch with oneDNN."""
        if device.kind != "cpu":
            return Missing("needs the CPU")
        return None if has_onednn else Missing("PyTorch is built without oneDNN for x86")

    def refusal(self, device: Device, call: AttentionCall) -> str | None:
        """Plain attention in fp32 alone, without gradients."""
        rules = (
            ("the type is not fp32", call.dtype != torch.float32),
            ("gradients are recorded", call.needs_grad),
            ("there is a mask", call.has_mask or call.is_causal),
            ("there is dropout", call.dropout > 0),
            ("several query heads share a key head", call.is_grouped),
            ("there are no tokens", not (call.query_tokens and call.key_tokens)),
            ("a graph is made", torch.compiler.is_compiling()),
        )
        return next((reason for reason, refused in rules if refused), None)

    def slower(self, device: Device, call: AttentionCall) -> str | None:
        """Where PyTorch's own kernel has good products, or there is little to compute."""
        if not (is_amd() and torch.backends.cpu.get_cpu_capability() == "AVX512"):
            return "PyTorch's own kernel is as fast on this processor"
        least = _LEAST_SCORES * torch.get_num_threads()
        few = call.query_tokens * call.key_tokens < least
        return "for so few tokens PyTorch's own kernel is as fast" if few else None

    def workspace_bytes(self, device: Device, call: AttentionCall) -> int:
        """One image's queries, a head's keys and values, and the scores of some of its queries."""
        queries = 4 * call.heads * call.query_tokens * call.head_dim
        return queries + self.copied_bytes(call) + self.scores_bytes(call)

    def copied_bytes(self, call: AttentionCall) -> int:
        """A head's keys and values, unless they lie together already."""
        return 4 * call.key_tokens * (call.head_dim + call.value_dim)

    def scores_bytes(self, call: AttentionCall) -> int:
        """Scores that are there at once, and what comes of them."""
        rows = min(call.query_tokens, _rows(call.key_tokens))
        return 4 * rows * (call.key_tokens + call.value_dim)

    def run(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, spec: AttentionSpec
    ) -> Tensor:
        """The result, heads beside one another in memory. Rounds as sums in one order do: in the
        last two bits."""
        batch, heads, queries, width = query.shape
        result = query.new_empty(batch, queries, heads, value.shape[-1]).transpose(1, 2)
        asked, rows = query.new_empty(heads, queries, width), _rows(key.shape[2])
        scale = scale_of(query, spec) * LOG2_E
        # Without bytes one head is as good as all.
        alike = isinstance(query, FakeTensor)

        def of_head(image: int, head: int) -> None:
            seen, given = key[image, head].contiguous(), value[image, head].contiguous().t()
            for first in range(0, queries, rows):
                part = slice(first, first + rows)
                scores = partial(_product, asked[head, part], seen)
                weighted(scores, partial(_product, columns=given), result[image, head, part])

        def of_image(image: int) -> None:
            torch.mul(query[image], scale, out=asked)
            for_each(heads, partial(of_head, image), alike=alike)

        for_each(batch, of_image, alike=alike)
        return result


def _product(rows: Tensor, columns: Tensor) -> Tensor:
    """rows · columnsᵀ."""
    assert ONEDNN_LINEAR is not None  # see `missing`
    return ONEDNN_LINEAR(rows, columns, None, "none", [], "")


def _rows(keys: int) -> int:
    """Queries whose scores are there at once."""
    return max(1, SCORES // max(1, keys))
