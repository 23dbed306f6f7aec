"""Attention on fake tensors with the allocations of a given CUDA kernel."""

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
from lowtide.memory.profiles import attention_scratch as scratch

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
        buffer = _allocate_workspace(tensors[0], scratch.efficient_forward_bytes(call))
        out = _aten._scaled_dot_product_efficient_attention(
            *tensors, bias, call.needs_grad, call.dropout, call.is_causal, scale=scale
        )[0]
        del buffer
        backward = scratch.efficient_backward_bytes(call)
    else:
        out = _aten._scaled_dot_product_cudnn_attention(
            *tensors, mask, call.needs_grad, call.dropout, call.is_causal, False, scale=scale
        )[0]
        backward = scratch.cudnn_backward_bytes(call)
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
    buffer = _allocate_workspace(tensors[0], scratch.flash_forward_bytes(call, multiprocessors))
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
    _workspace_in_backward(out, scratch.flash_backward_bytes(call), copies=[True, kept])
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
