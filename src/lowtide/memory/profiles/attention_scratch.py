"""Workspace bytes of CUDA's fused attention kernels.

They are the buffers that PyTorch's host code allocates around the kernels, read from
aten/src/ATen/native/transformers/cuda: flash_attn/flash_api.cpp (which follows FlashAttention 2),
mem_eff_attention/kernel_forward.h and kernel_backward.h (which follow xFormers), and
attention_backward.cu. The share of cuDNN is a prior: its workspace is private to the library.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of one attention call.

    ``element_bytes`` is 2 for fp16 and bf16, 4 for fp32.
    """

    batch: int
    heads: int
    query_tokens: int
    key_tokens: int
    head_dim: int
    value_dim: int
    element_bytes: int
    is_grouped: bool = False
    has_dropout: bool = False

    @property
    def rows(self) -> int:
        """Total rows of all score matrices."""
        return self.batch * self.heads * self.query_tokens

    @property
    def output_bytes(self) -> int:
        """Bytes of the result."""
        return self.rows * self.value_dim * self.element_bytes


def flash_forward_bytes(shape: AttentionShape, multiprocessors: int) -> int:
    """Return the workspace bytes of flash attention's forward pass.

    They hold fp32 partial results, one per split of the keys, where too few heads would leave
    multiprocessors idle.
    """
    if shape.has_dropout:
        return 0
    per_block = 256 if shape.head_dim <= 64 else 128 if shape.head_dim <= 128 else 64
    row_blocks = shape.batch * shape.heads * _ceil_div(shape.query_tokens, 64)
    splits = _splits(row_blocks, 2 * multiprocessors, _ceil_div(shape.key_tokens, per_block))
    return splits * shape.rows * (_flash_dim(shape) + 1) * 4 if splits > 1 else 0


def flash_backward_bytes(shape: AttentionShape) -> int:
    """Return the workspace bytes of flash attention's backward pass.

    They hold the query's gradient in fp32, a sum per row, and expanded gradients for grouped heads.
    """
    rows = shape.batch * shape.heads * _round_up(shape.query_tokens, 128)
    expanded = 0
    if shape.is_grouped:
        expanded = 2 * shape.batch * shape.heads * shape.key_tokens * shape.head_dim
    return rows * (_flash_dim(shape) + 1) * 4 + expanded * shape.element_bytes


def efficient_forward_bytes(shape: AttentionShape) -> int:
    """Return the workspace bytes of memory-efficient attention's forward pass.

    They hold an fp32 copy of the result, where it does not fit the registers.
    """
    wide = max(shape.head_dim, shape.value_dim) > 128
    return shape.rows * shape.value_dim * 4 if wide and shape.element_bytes == 2 else 0


def efficient_backward_bytes(shape: AttentionShape) -> int:
    """Return the workspace bytes of memory-efficient attention's backward pass.

    They hold fp32 accumulators of the gradients and a sum per row.
    """
    half = shape.element_bytes == 2
    widest = max(shape.head_dim, shape.value_dim)
    rows_per_block = 64 if widest <= 64 else 128
    keys_per_block = 128 if half and 64 < widest <= 128 else 64
    matrices = shape.batch * shape.heads
    per_matrix = _round_up(shape.query_tokens, rows_per_block) * _round_up(
        shape.head_dim, keys_per_block
    )
    if half and widest > rows_per_block:
        splits = min(_ceil_div(shape.key_tokens, keys_per_block), 200 // matrices)
        width = _round_up(shape.head_dim, rows_per_block) + _round_up(
            shape.value_dim, rows_per_block
        )
        per_matrix += max(1, splits) * keys_per_block * width
    product = 0 if half else shape.rows * shape.value_dim * 4
    return shape.rows * 4 + max(product, matrices * per_matrix * 4)


def cudnn_backward_bytes(shape: AttentionShape) -> int:
    """Return the workspace bytes of cuDNN attention's backward pass (a prior).

    They hold the query's gradient in fp32 and a sum per row, as other kernels need them.
    """
    return shape.rows * (shape.head_dim + 1) * 4


def _flash_dim(shape: AttentionShape) -> int:
    padded = _round_up(shape.head_dim, 8)
    return _round_up(padded, 32 if padded <= 128 else 64)


def _splits(row_blocks: int, slots: int, key_blocks: int) -> int:
    """Return the number of key splits by FlashAttention's rule.

    It is the fewest splits within 85 % of the best use of the slots.
    """
    if row_blocks >= 0.8 * slots:
        return 1
    uses: dict[int, float] = {}
    for splits in range(1, min(128, slots, key_blocks) + 1):
        if splits == 1 or _ceil_div(key_blocks, splits) != _ceil_div(key_blocks, splits - 1):
            waves = row_blocks * splits / slots
            uses[splits] = waves / _ceil_div(row_blocks * splits, slots)
    best = max(uses.values())
    return next(splits for splits, use in uses.items() if use >= 0.85 * best)


def _ceil_div(count: int, size: int) -> int:
    return -(-count // size)


def _round_up(count: int, multiple: int) -> int:
    return _ceil_div(count, multiple) * multiple
