"""One call of attention on fake tensors, allocating as a given CUDA kernel does."""

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


def run_as(
    path: AttentionPath,
    call: AttentionCall,
    tensors: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    scale: float | None,
    grouped: bool,
    multiprocessors: int | None,
) -> Tensor:
    """The result of attention, (batch, heads, query tokens, value head dimension), by ``path``.

    ``tensors`` are query, key and value, fake or on the meta device; ``grouped`` lets query
    heads share key heads. Scratch is left out where ``multiprocessors`` is None.
    """
    if not all(_has_no_data(tensor) for tensor in tensors):
        raise TypeError("attention as on another device needs fake tensors: it computes nothing")
    if mask is not None and mask.dtype == torch.bool:
        mask = _as_bias(mask, call.dtype)
    if path == "math":
        return _math(call, tensors, mask, scale, grouped, multiprocessors is not None)
    if path == "flash":
        return _flash(call, tensors, scale, multiprocessors)
    shape = _shape(call)
    if path == "efficient":
        bias = None if mask is None else _aligned(mask, tensors[0], tensors[1])
        hold = _hold(tensors[0], shape, multiprocessors, scratch.efficient_forward_bytes)
        out = _aten._scaled_dot_product_efficient_attention(
            *tensors, bias, call.needs_grad, call.dropout, call.is_causal, scale=scale
        )[0]
        del hold
        backward = scratch.efficient_backward_bytes(shape)
    else:
        out = _aten._scaled_dot_product_cudnn_attention(
            *tensors, mask, call.needs_grad, call.dropout, call.is_causal, False, scale=scale
        )[0]
        backward = scratch.cudnn_backward_bytes(shape)
    if multiprocessors is not None:
        _scratch_in_backward(out, backward, copies=[True] if path == "efficient" else [])
    return out


def _flash(
    call: AttentionCall,
    tensors: tuple[Tensor, ...],
    scale: float | None,
    multiprocessors: int | None,
) -> Tensor:
    """Head dimensions are padded to a multiple of 8 and the result is cut, as PyTorch does."""
    padding = -call.head_dim % 8
    if padding:
        tensors = tuple(F.pad(tensor, (0, padding)) for tensor in tensors)
    shape = _shape(call)
    hold = _hold(
        tensors[0],
        shape,
        multiprocessors,
        lambda s: scratch.flash_forward_bytes(s, multiprocessors or 1),
    )
    out = _aten._scaled_dot_product_flash_attention(
        *tensors,
        call.dropout,
        call.is_causal,
        False,
        scale=1 / math.sqrt(call.head_dim) if scale is None else scale,
    )[0]
    del hold
    if multiprocessors is not None:
        # The backward pass copies a result that is not contiguous by tokens, and its gradient.
        kept = not out.transpose(1, 2).is_contiguous()
        _scratch_in_backward(out, scratch.flash_backward_bytes(shape), copies=[True, kept])
    return out[..., : call.head_dim] if padding else out


def _math(
    call: AttentionCall,
    tensors: tuple[Tensor, ...],
    mask: Tensor | None,
    scale: float | None,
    grouped: bool,
    with_scratch: bool,
) -> Tensor:
    hold = None
    if with_scratch:
        # The softmax looks for rows that are masked as a whole: a flag per score.
        query, key = tensors[:2]
        hold = query.new_empty((*query.shape[:-1], key.shape[-2]), dtype=torch.bool)
    out = _aten._scaled_dot_product_attention_math(
        *tensors, mask, call.dropout, call.is_causal, None, scale=scale, enable_gqa=grouped
    )[0]
    del hold
    if with_scratch and (softmax := _softmax_of(out, *tensors, mask)) is not None:
        # Its backward pass multiplies the gradient by the result first, into memory of its own:
        # softmax_backward_cuda_out in aten/src/ATen/native/cuda/SoftMax.cu.
        _hold_during(softmax, lambda gradient: gradient.numel() * gradient.element_size())
    return out


def _softmax_of(out: Tensor, *given: Tensor | None) -> Node | None:
    """The backward pass of the softmax that made ``out`` of what was ``given``, if there is one."""
    # What was given may come from attention as well.
    seen = {tensor.grad_fn for tensor in given if tensor is not None}
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
    """A mask of truth values as numbers to add: the fused kernels read nothing else."""
    return torch.where(mask, torch.zeros((), dtype=dtype, device=mask.device), -math.inf)


def _aligned(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The mask with rows at multiples of 8 elements, expanded to all batches and heads."""
    if mask.stride(-1) != 1 or any(stride % 8 for stride in mask.stride()[:-1]):
        width = mask.shape[-1]
        mask = F.pad(mask, (0, 8 - width % 8))[..., :width]
    return mask.expand(*query.shape[:-1], key.shape[-2])


def _shape(call: AttentionCall) -> scratch.AttentionShape:
    return scratch.AttentionShape(
        batch=call.batch,
        heads=call.heads,
        query_tokens=call.query_tokens,
        key_tokens=call.key_tokens,
        head_dim=call.head_dim,
        value_dim=call.value_dim,
        element_bytes=call.dtype.itemsize,
        is_grouped=call.is_grouped,
        has_dropout=call.dropout > 0,
    )


def _hold(
    like: Tensor,
    shape: scratch.AttentionShape,
    multiprocessors: int | None,
    price: Callable[[scratch.AttentionShape], int],
) -> Tensor | None:
    size = price(shape) if multiprocessors is not None else 0
    return like.new_empty(size, dtype=torch.uint8) if size else None


def _scratch_in_backward(out: Tensor, size: int, *, copies: list[bool]) -> None:
    """Hold scratch while the gradients of ``out`` are computed.

    ``copies`` says of the gradient, and of the result itself, whether the kernel wants it
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

    _hold_during(node, price)


def _hold_during(node: Node, price: Callable[[Tensor], int]) -> None:
    """Hold what ``price`` makes of the incoming gradient, in bytes, while ``node`` runs."""
    held: list[Tensor] = []

    def begin(gradients: tuple[Any, ...]) -> None:
        gradient = gradients[0]
        held.append(gradient.new_empty(price(gradient), dtype=torch.uint8))

    def end(inputs: Any, outputs: Any) -> None:
        held.clear()

    node.register_prehook(begin)
    node.register_hook(end)
