"""Attention on fake tensors with the allocations of a given CUDA kernel.

Workspaces are the buffers that PyTorch's host code allocates around the kernels, read from
aten/src/ATen/native/transformers/cuda: flash_attn/flash_api.cpp (which follows FlashAttention 2),
mem_eff_attention/kernel_forward.h and kernel_backward.h (which follow xFormers), and
attention_backward.cu. The share of cuDNN is a prior: its workspace is private to the library.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import Node

from lowtide.attention.sdpa_rules import AttentionPath
from lowtide.attention.spec import AttentionCall

_aten = torch.ops.aten


def run_fake_attention(
    path: AttentionPath,
    call: AttentionCall,
    tensors: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    scale: float | None,
    enable_gqa: bool,
    multiprocessors: int,
) -> Tensor:
    """Run attention on fake tensors, allocating as the kernel ``path`` does.

    Args:
        path: The kernel.
        call: Sizes and settings of the call.
        tensors: Query, key and value, (B, heads, N, head dim) each, fake or on the meta device.
        mask: Attention mask, broadcastable to (B, heads, queries, keys), or None.
        scale: Scale of the scores; None for the default.
        enable_gqa: Whether query heads share key heads (grouped-query attention).
        multiprocessors: Number of the GPU's multiprocessors.

    Returns:
        (B, heads, queries, value's head dim).
    """
    if not all(_has_no_data(tensor) for tensor in tensors):
        raise TypeError(
            "attention traced for another device needs fake tensors: no values are computed"
        )
    if mask is not None and mask.dtype == torch.bool:
        mask = _as_bias(mask, call.dtype)
    if path == "math":
        return _math(call, tensors, mask, scale, enable_gqa)
    if path == "flash":
        return _flash(call, tensors, scale, multiprocessors)
    if path == "efficient":
        bias = None if mask is None else _aligned(mask, tensors[0], tensors[1])
        buffer = _allocate_workspace(tensors[0], efficient_forward_bytes(call))
        out = _aten._scaled_dot_product_efficient_attention(
            *tensors, bias, call.needs_grad, call.dropout, call.is_causal, scale=scale
        )[0]
        del buffer
        backward = efficient_backward_bytes(call)
    else:
        out = _aten._scaled_dot_product_cudnn_attention(
            *tensors, mask, call.needs_grad, call.dropout, call.is_causal, False, scale=scale
        )[0]
        backward = cudnn_backward_bytes(call)
    _workspace_in_backward(out, backward, copies=[True] if path == "efficient" else [])
    return out


def _flash(
    call: AttentionCall,
    tensors: tuple[Tensor, ...],
    scale: float | None,
    multiprocessors: int,
) -> Tensor:
    """Run flash attention, head dims padded to a multiple of 8 and the result cut.

    PyTorch does the same.
    """
    padding = -call.head_dim % 8
    if padding:
        tensors = tuple(F.pad(tensor, (0, padding)) for tensor in tensors)
    buffer = _allocate_workspace(tensors[0], flash_forward_bytes(call, multiprocessors))
    out = _aten._scaled_dot_product_flash_attention(
        *tensors,
        call.dropout,
        call.is_causal,
        False,
        scale=1 / math.sqrt(call.head_dim) if scale is None else scale,
    )[0]
    del buffer
    # The backward pass copies the result and its gradient if they are not contiguous by tokens.
    kept = not out.transpose(1, 2).is_contiguous()
    _workspace_in_backward(out, flash_backward_bytes(call), copies=[True, kept])
    return out[..., : call.head_dim] if padding else out


def _math(
    call: AttentionCall,
    tensors: tuple[Tensor, ...],
    mask: Tensor | None,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    # The softmax looks for fully masked rows, with a flag per score.
    query, key = tensors[:2]
    buffer = query.new_empty((*query.shape[:-1], key.shape[-2]), dtype=torch.bool)
    out = _aten._scaled_dot_product_attention_math(
        *tensors, mask, call.dropout, call.is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]
    del buffer
    if (softmax := _softmax_of(out, *tensors, mask)) is not None:
        # Its backward pass first multiplies the gradient by the result, into a new tensor:
        # softmax_backward_cuda_out in aten/src/ATen/native/cuda/SoftMax.cu.
        _workspace_during(softmax, lambda gradient: gradient.numel() * gradient.element_size())
    return out


def _softmax_of(out: Tensor, *inputs: Tensor | None) -> Node | None:
    """Return the backward node of the softmax that made ``out``, if there is one."""
    # The inputs may come from attention as well.
    seen = {tensor.grad_fn for tensor in inputs if tensor is not None}
    ahead = [out.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        if "SoftmaxBackward" in node.name():
            return node
        seen.add(node)
        ahead += [following for following, _ in node.next_functions]
    return None


def _has_no_data(tensor: Tensor) -> bool:
    return tensor.is_meta or hasattr(tensor, "fake_mode")


def _as_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a boolean mask to an additive one, which fused kernels need."""
    return torch.where(mask, torch.zeros((), dtype=dtype, device=mask.device), -math.inf)


def _aligned(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Expand the mask to all batches and heads, its rows at multiples of 8 elements."""
    if mask.stride(-1) != 1 or any(stride % 8 for stride in mask.stride()[:-1]):
        width = mask.shape[-1]
        mask = F.pad(mask, (0, 8 - width % 8))[..., :width]
    return mask.expand(*query.shape[:-1], key.shape[-2])


def _allocate_workspace(like: Tensor, size: int) -> Tensor | None:
    return like.new_empty(size, dtype=torch.uint8) if size else None


def _workspace_in_backward(out: Tensor, size: int, *, copies: list[bool]) -> None:
    """Hold workspace while the gradients of ``out`` are computed.

    ``copies`` says for the gradient, and for the result itself, whether the kernel wants it
    contiguous by tokens and so copies it if it is not.
    """
    node = out.grad_fn
    if node is None:
        return
    result_copies = copies[1:].count(True)

    def price(gradient: Tensor) -> int:
        copied = gradient.numel() * gradient.element_size()
        moved = bool(copies) and not gradient.transpose(1, 2).is_contiguous()
        return size + (moved + result_copies) * copied

    _workspace_during(node, price)


def _workspace_during(node: Node, price: Callable[[Tensor], int]) -> None:
    """Hold workspace while ``node`` runs.

    ``price`` returns its bytes for the incoming gradient.
    """
    held: list[Tensor] = []

    def begin(gradients: tuple[Any, ...]) -> None:
        gradient = gradients[0]
        held.append(gradient.new_empty(price(gradient), dtype=torch.uint8))

    def end(inputs: Any, outputs: Any) -> None:
        held.clear()

    node.register_prehook(begin)
    node.register_hook(end)


def _score_rows(call: AttentionCall) -> int:
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
    return splits * _score_rows(call) * (_flash_dim(call) + 1) * 4 if splits > 1 else 0


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
    return _score_rows(call) * call.value_dim * 4 if wide and call.dtype.itemsize == 2 else 0


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
    product = 0 if half else _score_rows(call) * call.value_dim * 4
    return _score_rows(call) * 4 + max(product, matrices * per_matrix * 4)


def cudnn_backward_bytes(call: AttentionCall) -> int:
    """Return the workspace bytes of cuDNN attention's backward pass (a prior).

    They hold the query's gradient in fp32 and a sum per row, as other kernels need them.
    """
    return _score_rows(call) * (call.head_dim + 1) * 4


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
