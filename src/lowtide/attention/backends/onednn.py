"""CPU attention by oneDNN matrix products over whole rows of scores."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lowtide.attention.backends.backend import Backend, Missing, scale_of
from lowtide.attention.backends.chunked import SCORES_PER_BLOCK
from lowtide.attention.cpu_ops import LOG2_E, exp2_softmax_matmul, has_onednn, onednn_linear
from lowtide.attention.spec import AttentionCall, AttentionDevice, AttentionSpec
from lowtide.core.cpuinfo import is_amd
from lowtide.core.trace_cache import repeat_call

# Least scores of one head, per thread: with fewer, threads wait for each other too often. PyTorch's
# kernel instead distributes heads over threads.
_LEAST_SCORES = 1 << 16


class OneDnn(Backend):
    """Attention head by head: a oneDNN product, exp2, and another product.

    PyTorch's fused kernel uses MKL for its products, which takes twice as long on AMD CPUs with
    AVX-512, and uses small blocks of queries where there are fewer than 768.
    """

    name = "onednn"
    about = "whole rows of scores by oneDNN's products; for AMD CPUs with AVX-512"
    verified_on = frozenset({"cpu"})

    def missing_requirement(self, device: AttentionDevice) -> Missing | None:
        """Require an x86 CPU and a build of PyTorch with oneDNN."""
        if device.kind != "cpu":
            return Missing("needs the CPU")
        return None if has_onednn else Missing("PyTorch is built without oneDNN for x86")

    def refusals(self, call: AttentionCall) -> Iterable[tuple[str, bool]]:
        """Refuse all but fp32 inference, optionally with an additive mask."""
        return (
            ("the dtype is not fp32", call.dtype != torch.float32),
            ("gradients are recorded", call.needs_grad or call.mask_needs_grad),
            ("the mask is boolean, not additive", call.mask_is_boolean),
            ("attention is causal", call.is_causal),
            ("there is dropout", call.dropout > 0),
            ("several query heads share a key head", call.is_grouped),
            ("there are no tokens", not (call.query_tokens and call.key_tokens)),
            ("a graph is being compiled", torch.compiler.is_compiling()),
        )

    def not_preferred_reason(self, device: AttentionDevice, call: AttentionCall) -> str | None:
        """Prefer PyTorch's kernel except on AMD CPUs with AVX-512 and many scores."""
        if not (is_amd() and torch.backends.cpu.get_cpu_capability() == "AVX512"):
            return "PyTorch's own kernel is as fast on this CPU"
        least = _LEAST_SCORES * torch.get_num_threads()
        few = call.query_tokens * call.key_tokens < least
        return "for so few tokens PyTorch's own kernel is as fast" if few else None

    def workspace_bytes(self, device: AttentionDevice, call: AttentionCall) -> int:
        """Add up `copied_bytes` and `block_bytes`."""
        return self.copied_bytes(call) + self.block_bytes(call)

    def copied_bytes(self, call: AttentionCall) -> int:
        """Count the contiguous copies of one head's keys and values, in bytes."""
        return 4 * call.key_tokens * (call.head_dim + call.value_dim)

    def block_bytes(self, call: AttentionCall) -> int:
        """Count one block of queries, its scores, their mask and the result, in bytes."""
        rows = min(call.query_tokens, _rows(call.key_tokens))
        scores = call.key_tokens * (2 if call.has_mask else 1)
        return 4 * rows * (call.head_dim + scores + call.value_dim)

    def run(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, spec: AttentionSpec
    ) -> Tensor:
        """Compute attention: (B, heads, queries, value's head dim).

        The result's memory layout is (B, queries, heads, value's head dim). Rounds as sums in one
        fixed order do: in the last two bits.
        """
        batch, heads, queries, width = query.shape
        result = query.new_empty(batch, queries, heads, value.shape[-1]).transpose(1, 2)
        rows = min(queries, _rows(key.shape[2]))
        query_buffer, scale = query.new_empty(rows, width), scale_of(query, spec) * LOG2_E
        added = None if mask is None else mask.expand(-1, heads, queries, key.shape[2])
        # A mask shared by all images, as for windows, is scaled once.
        per_image_mask = added is not None and len(added) > 1
        # Fake tensors: one head stands for all.
        alike = isinstance(query, FakeTensor)

        def of_image(head: int, part: slice, shared: Tensor | None, image: int) -> None:
            seen, given = key[image, head].contiguous(), value[image, head].contiguous().t()
            plus = _scaled_mask(added, image, head, part) if per_image_mask else shared
            some = query[image, head, part]
            asked = torch.mul(some, scale, out=query_buffer[: len(some)])
            scores = partial(onednn_linear, asked, seen, plus=plus)
            weigh, found = partial(onednn_linear, weight=given), result[image, head, part]
            exp2_softmax_matmul(scores, weigh, found, zero_fully_masked=plus is not None)

        def of_head(head: int) -> None:
            for first in range(0, queries, rows):
                part = slice(first, first + rows)
                shared = None if per_image_mask else _scaled_mask(added, 0, head, part)
                repeat_call(batch, partial(of_image, head, part, shared), identical=alike)

        repeat_call(heads, of_head, identical=alike)
        return result


def _scaled_mask(added: Tensor | None, image: int, head: int, part: slice) -> Tensor | None:
    """Scale some queries' mask by log2 e, as contiguous fp32."""
    if added is None:
        return None
    return torch.mul(added[image, head, part].to(torch.float32), LOG2_E).contiguous()


def _rows(keys: int) -> int:
    """Return the number of queries per block of scores."""
    return max(1, SCORES_PER_BLOCK // max(1, keys))
