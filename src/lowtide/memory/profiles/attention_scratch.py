"""Workspace bytes of CUDA's fused attention kernels.

They are the buffers that PyTorch's host code allocates around the kernels, read from
aten/src/ATen/native/transformers/cuda: flash_attn/flash_api.cpp (which follows FlashAttention 2),
mem_eff_attention/kernel_forward.h and kernel_backward.h (which follow xFormers), and
attention_backward.cu. The share of cuDNN is a prior: its workspace is private to the library.
"""

from __future__ import annotations

from lowtide.attention.spec import AttentionCall


def rows(call: AttentionCall) -> int:
    """Return the total rows of all score matrices."""
    return call.batch * call.heads * call.query_tokens


def flash_forward_bytes(call: AttentionCall, multiprocessors: int) -> int:
    """Return the workspace bytes of flash attention's forward pass.

    They hold fp32 partial results, one per split of the keys, where too few heads would leave
    multiprocessors idle.
    """
    if call.dropout:
        return 0
    per_block = 256 if call.head_dim <= 64 else 128 if call.head_dim <= 128 else 64
    row_blocks = call.batch * call.heads * _ceil_div(call.query_tokens, 64)
    splits = _splits(row_blocks, 2 * multiprocessors, _ceil_div(call.key_tokens, per_block))
    return splits * rows(call) * (_flash_dim(call) + 1) * 4 if splits > 1 else 0


def flash_backward_bytes(call: AttentionCall) -> int:
    """Return the workspace bytes of flash attention's backward pass.

    They hold the query's gradient in fp32, a sum per row, and expanded gradients for grouped heads.
    """
    padded = call.batch * call.heads * _round_up(call.query_tokens, 128)
    expanded = 0
    if call.is_grouped:
        expanded = 2 * call.batch * call.heads * call.key_tokens * call.head_dim
    return padded * (_flash_dim(call) + 1) * 4 + expanded * call.dtype.itemsize


def efficient_forward_bytes(call: AttentionCall) -> int:
    """Return the workspace bytes of memory-efficient attention's forward pass.

    They hold an fp32 copy of the result, where it does not fit the registers.
    """
    wide = max(call.head_dim, call.value_dim) > 128
    return rows(call) * call.value_dim * 4 if wide and call.dtype.itemsize == 2 else 0


def efficient_backward_bytes(call: AttentionCall) -> int:
    """Return the workspace bytes of memory-efficient attention's backward pass.

    They hold fp32 accumulators of the gradients and a sum per row.
    """
    half = call.dtype.itemsize == 2
    widest = max(call.head_dim, call.value_dim)
    rows_per_block = 64 if widest <= 64 else 128
    keys_per_block = 128 if half and 64 < widest <= 128 else 64
    matrices = call.batch * call.heads
    per_matrix = _round_up(call.query_tokens, rows_per_block) * _round_up(
        call.head_dim, keys_per_block
    )
    if half and widest > rows_per_block:
        splits = min(_ceil_div(call.key_tokens, keys_per_block), 200 // matrices)
        width = _round_up(call.head_dim, rows_per_block) + _round_up(call.value_dim, rows_per_block)
        per_matrix += max(1, splits) * keys_per_block * width
    product = 0 if half else rows(call) * call.value_dim * 4
    return rows(call) * 4 + max(product, matrices * per_matrix * 4)


def cudnn_backward_bytes(call: AttentionCall) -> int:
    """Return the workspace bytes of cuDNN attention's backward pass (a prior).

    They hold the query's gradient in fp32 and a sum per row, as other kernels need them.
    """
    return rows(call) * (call.head_dim + 1) * 4


def _flash_dim(call: AttentionCall) -> int:
    padded = _round_up(call.head_dim, 8)
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
