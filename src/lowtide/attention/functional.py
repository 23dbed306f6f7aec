"""Scaled dot-product attention as a function, dispatched to the best backend."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from lowtide.attention.backends import get_backend
from lowtide.attention.dispatch import Policy, ResolvedBackend, resolve
from lowtide.attention.spec import AttentionCall, AttentionSpec, LocalDevice, describe_call
from lowtide.core.errors import UsageError

_DEFAULT = AttentionSpec()
_LAYOUT = "(batch, heads, tokens, head dimension); `.transpose(1, 2)` swaps heads and tokens"


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    spec: AttentionSpec = _DEFAULT,
    *,
    backend: str | None = None,
    policy: Policy | None = None,
    resolution: ResolvedBackend | None = None,
) -> Tensor:
    """Compute softmax(scale · Q Kᵀ + mask) V with the best backend.

    Args:
        query: (..., heads, queries, head dim), at least 4 dimensions, floating point of any range.
        key: (..., heads, keys, head dim) in the query's dtype; fewer heads only with
            ``spec.grouped``.
        value: (..., heads, keys, value's head dim), with the key's heads.
        mask: broadcastable to (..., heads, queries, keys), at least 2 dimensions; boolean, True
            where a query sees a key, or floating point, added to the scores. May require a
            gradient.
        spec: scale, causality, dropout and grouped heads.
        backend: name of a backend; strict unless ``policy`` is ``"prefer"``.
        policy: see `resolve`.
        resolution: an earlier result of `resolve` for calls of this kind, which skips the
            selection.

    Returns:
        (..., heads, queries, value's head dim) in the query's dtype. Queries that see no key get
        zeros. Accuracy is that of the backend; all but ``sage`` (8-bit scores) are exact up to
        rounding.

    Raises:
        UsageError: tensors do not fit together, or no backend supports the call.
    """
    _check(query, key, value, mask, spec)
    lead = query.shape[:-3]
    if len(lead) > 1:  # with 5 dimensions PyTorch's fused kernels are not taken
        query, key, value = (t.reshape(-1, *t.shape[-3:]) for t in (query, key, value))
    if mask is not None:
        mask = _mask_to_4d(mask, lead, query)
    # Described once: windows are so small that repeated tensor inspection is measurable.
    call = describe_call((query, key, value), mask, spec)
    if resolution is None:
        device = LocalDevice.of(query.device)
        trial = not torch.compiler.is_compiling()
        resolution = resolve_cached(call, device, backend, policy, trial)
    chosen = get_backend(resolution.backend)
    if resolution.max_heads is None:
        result = chosen.run_with_call(call, query, key, value, mask, spec)
    else:
        result = _run_in_launches(chosen.run, query, key, value, mask, spec, resolution.max_heads)
    return result.reshape(*lead, *result.shape[1:]) if len(lead) > 1 else result


@functools.lru_cache(maxsize=4096)
def resolve_cached(
    call: AttentionCall,
    device: LocalDevice,
    backend: str | None,
    policy: Policy | None,
    verify: bool = True,
) -> ResolvedBackend:
    """Cached `resolve`.

    The windows of one image need the same resolution hundreds of times.
    """
    return resolve(call, device, backend=backend, policy=policy, verify=verify)


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    spec: AttentionSpec = _DEFAULT,
    *,
    backend: str | None = None,
    policy: Policy | None = None,
) -> str:
    """Explain which backend `attention` chooses for these tensors, and why not others.

    Shapes are those of `attention`: (..., heads, queries or keys, head dim).
    """
    _check(query, key, value, mask, spec)
    call = describe_tensors(query, key, value, mask, spec)
    device = LocalDevice.of(query.device)
    return resolve(call, device, backend=backend, policy=policy).explain()


def describe_tensors(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, spec: AttentionSpec
) -> AttentionCall:
    """Describe tensors (..., heads, N, head dim) as the `AttentionCall` a backend gets.

    Leading dimensions are merged into one batch, so that the call has 4 dimensions. Its mask needs
    a gradient only if gradients are recorded.
    """
    lead = query.shape[:-3]
    query, key, value = (t.reshape(-1, *t.shape[-3:]) for t in (query, key, value))
    if mask is not None:
        mask = _mask_to_4d(mask, lead, query)
    return describe_call((query, key, value), mask, spec)


def _check(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, spec: AttentionSpec
) -> None:
    """Raise `UsageError` for tensors that do not fit together, by name."""
    if (problem := _shape_error(query, key, value, spec)) is not None:
        what, hint = problem
        shapes = f"query {_shape(query)}, key {_shape(key)}, value {_shape(value)}"
        raise UsageError(f"{what}: {shapes}", hint=_LAYOUT + hint)
    heads = query.shape[-3], key.shape[-3]
    if heads[1] == 0 or heads[0] % heads[1]:
        raise UsageError(f"{heads[0]} query heads cannot share {heads[1]} key heads")
    if not query.dtype == key.dtype == value.dtype or not query.is_floating_point():
        names = ", ".join(str(t.dtype).removeprefix("torch.") for t in (query, key, value))
        raise UsageError(f"query, key and value must share a floating-point dtype, not {names}")
    places = {t.device for t in (query, key, value, *([] if mask is None else [mask]))}
    if len(places) > 1:
        raise UsageError(f"tensors are on several devices: {', '.join(map(str, places))}")
    if not 0 <= spec.dropout < 1:
        raise UsageError(f"dropout {spec.dropout} is not between 0 and 1")
    if mask is not None:
        _check_mask(query, key, mask)


def _shape_error(
    query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec
) -> tuple[str, str] | None:
    """Return (shape error, suffix of the hint), None if the shapes fit."""
    query_shape, key_shape, value_shape = query.shape, key.shape, value.shape
    if min(len(query_shape), len(key_shape), len(value_shape)) < 4:
        return "attention needs at least 4 dimensions", ""
    if query_shape[-1] != key_shape[-1]:
        return "query and key differ in head dimension", ""
    if key_shape[-2] != value_shape[-2]:
        return "key and value differ in tokens", ""
    if not query_shape[:-3] == key_shape[:-3] == value_shape[:-3]:
        return "query, key and value differ in batch", ""
    if key_shape[-3] != value_shape[-3] or (query_shape[-3] != key_shape[-3] and not spec.grouped):
        hint = "; shared key heads need AttentionSpec(grouped=True)"
        return "query, key and value differ in heads", hint
    return None


def _check_mask(query: Tensor, key: Tensor, mask: Tensor) -> None:
    wanted = *query.shape[:-1], key.shape[-2]
    sizes = mask.shape
    fits = len(sizes) <= len(wanted) and all(
        one in (1, other) for one, other in zip(sizes[::-1], wanted[::-1], strict=False)
    )
    if len(sizes) < 2 or not fits:
        raise UsageError(f"a mask of shape {_shape(mask)} does not fit scores of {wanted}")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        kind = str(mask.dtype).removeprefix("torch.")
        raise UsageError(
            f"a mask of {kind} is neither boolean nor floating point",
            hint="mask.bool(), where True lets a query attend to a key",
        )


def _shape(tensor: Tensor) -> str:
    return "×".join(map(str, tensor.shape)) or "()"


def _mask_to_4d(mask: Tensor, lead: torch.Size, query: Tensor) -> Tensor:
    """Reshape the mask to 4 dimensions, the first being 1 or the flattened batch.

    It is detached where no gradient is recorded: a mask that requires one rules out fused kernels.
    """
    if not torch.is_grad_enabled():
        mask = mask.detach()
    inner = mask.shape[-3:] if mask.dim() > 2 else (1, *mask.shape)
    outer = mask.shape[:-3]
    if all(size == 1 for size in outer):
        return mask.reshape(1, *inner)
    missing = len(lead) - len(outer)
    spread = mask.reshape(*(1,) * missing, *outer, *inner).expand(*lead, *inner)
    return spread.reshape(len(query), *inner)


def _run_in_launches(
    run: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    spec: AttentionSpec,
    max_heads: int,
) -> Tensor:
    """Run at most ``max_heads`` batches × heads per launch.

    More exceed the limits of a CUDA grid. Nothing is summed across them, so the result is the same.
    """
    batch, heads = query.shape[:2]
    if batch * heads <= max_heads:
        return run(query, key, value, mask, spec)
    dim, step = (0, max(1, max_heads // heads)) if batch > 1 else (1, max_heads)
    if dim and spec.grouped and key.shape[1] != heads:
        raise UsageError(
            f"{heads} query heads that share key heads exceed the limit of {max_heads}"
        )

    def part(tensor: Tensor, start: int) -> Tensor:
        return tensor.narrow(dim, start, min(step, tensor.shape[dim] - start))

    def part_of_mask(start: int) -> Tensor | None:
        return mask if mask is None or mask.shape[dim] == 1 else part(mask, start)

    return torch.cat(
        [
            _run_in_launches(
                run,
                part(query, start),
                part(key, start),
                part(value, start),
                part_of_mask(start),
                spec,
                max_heads,
            )
            for start in range(0, query.shape[dim], step)
        ],
        dim,
    )
