"""One call for attention, whatever computes it."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from lowtide.attention.backends import get
from lowtide.attention.dispatch import Policy, Resolution, resolve
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
    resolution: Resolution | None = None,
) -> Tensor:
    """softmax(scale · Q Kᵀ + mask) V.

    Args:
        query: (..., heads, tokens, head dimension), at least 4 dimensions.
        key: the same with its own tokens; heads may be fewer where ``spec.grouped``.
        value: like ``key``, with a head dimension of its own.
        mask: broadcast over (..., heads, query tokens, key tokens); True where a query sees a
            key, or numbers that are added to the scores. May need a gradient.
        spec: what else the result depends on.
        backend: a backend by name, meant strictly unless ``policy`` is ``"prefer"``.
        policy: see `resolve`.
        resolution: a choice made before for calls of this kind; nothing is decided then.

    Returns:
        (..., heads, query tokens, value's head dimension) in the query's dtype. Queries that see
        no key get zeros.

    Accuracy: that of the backend; all but ``sage`` (8-bit scores) are exact up to rounding.
    Raises `UsageError` for tensors that do not fit together, and if nothing can compute the call.
    """
    _check(query, key, value, mask, spec)
    lead = query.shape[:-3]
    if len(lead) > 1:  # with 5 dimensions PyTorch's fused kernels are not taken
        query, key, value = (t.reshape(-1, *t.shape[-3:]) for t in (query, key, value))
    if mask is not None:
        mask = _four_dimensions(mask, lead, query)
    # Described once: a window is so little work that each look at its tensors counts.
    call = describe_call((query, key, value), mask, spec)
    if resolution is None:
        device = LocalDevice.of(query.device)
        trial = not torch.compiler.is_compiling()
        resolution = resolved(call, device, backend, policy, trial)
    chosen = get(resolution.backend)
    if resolution.most_heads is None:
        result = chosen.run_described(call, query, key, value, mask, spec)
    else:
        result = _in_parts(chosen.run, query, key, value, mask, spec, resolution.most_heads)
    return result.reshape(*lead, *result.shape[1:]) if len(lead) > 1 else result


@functools.lru_cache(maxsize=4096)
def resolved(
    call: AttentionCall,
    device: LocalDevice,
    backend: str | None,
    policy: Policy | None,
    trial: bool = True,
) -> Resolution:
    """`resolve`, remembered: windows of one image ask the same thing hundreds of times."""
    return resolve(call, device, backend=backend, policy=policy, trial=trial)


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
    """Which backend `attention` takes for these tensors, and why not each of the others."""
    _check(query, key, value, mask, spec)
    call = describe(query, key, value, mask, spec)
    device = LocalDevice.of(query.device)
    return resolve(call, device, backend=backend, policy=policy).explain()


def describe(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, spec: AttentionSpec
) -> AttentionCall:
    """The call as a backend gets it: 4 dimensions, and a mask that learns only if gradients are
    recorded."""
    lead = query.shape[:-3]
    query, key, value = (t.reshape(-1, *t.shape[-3:]) for t in (query, key, value))
    if mask is not None:
        mask = _four_dimensions(mask, lead, query)
    return describe_call((query, key, value), mask, spec)


def _check(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, spec: AttentionSpec
) -> None:
    """Raise `UsageError` naming what does not fit."""
    if (problem := _misfit(query, key, value, spec)) is not None:
        what, hint = problem
        shapes = f"query {_shape(query)}, key {_shape(key)}, value {_shape(value)}"
        raise UsageError(f"{what}: {shapes}", hint=_LAYOUT + hint)
    heads = query.shape[-3], key.shape[-3]
    if heads[1] == 0 or heads[0] % heads[1]:
        raise UsageError(f"{heads[0]} query heads cannot share {heads[1]} key heads")
    if not query.dtype == key.dtype == value.dtype or not query.is_floating_point():
        names = ", ".join(str(t.dtype).removeprefix("torch.") for t in (query, key, value))
        raise UsageError(f"query, key and value must share a floating point type, not {names}")
    places = {t.device for t in (query, key, value, *([] if mask is None else [mask]))}
    if len(places) > 1:
        raise UsageError(f"tensors lie on several devices: {', '.join(map(str, places))}")
    if not 0 <= spec.dropout < 1:
        raise UsageError(f"dropout {spec.dropout} is not between 0 and 1")
    if mask is not None:
        _check_mask(query, key, mask)


def _misfit(
    query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec
) -> tuple[str, str] | None:
    """(What of the tensors' shapes does not fit, and a word on it)"""
    asked, seen, given = query.shape, key.shape, value.shape
    if min(len(asked), len(seen), len(given)) < 4:
        return "attention needs at least 4 dimensions", ""
    if asked[-1] != seen[-1]:
        return "query and key differ in head dimension", ""
    if seen[-2] != given[-2]:
        return "key and value differ in tokens", ""
    if not asked[:-3] == seen[:-3] == given[:-3]:
        return "query, key and value differ in batch", ""
    if seen[-3] != given[-3] or (asked[-3] != seen[-3] and not spec.grouped):
        hint = "; heads that are shared need AttentionSpec(grouped=True)"
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
            f"a mask of {kind} is neither true or false nor a number to add",
            hint="mask.bool(), where True lets a query see a key",
        )


def _shape(tensor: Tensor) -> str:
    return "×".join(map(str, tensor.shape)) or "()"


def _four_dimensions(mask: Tensor, lead: torch.Size, query: Tensor) -> Tensor:
    """The mask with 4 dimensions, its first that of the flattened batch or 1.

    Where no gradient is recorded it is detached: one that could need it costs fused kernels.
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


def _in_parts(
    run: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    spec: AttentionSpec,
    most: int,
) -> Tensor:
    """Run at most ``most`` batches × heads at once: more do not fit a launch, and are not added
    up across, so that the result is the same."""
    batch, heads = query.shape[:2]
    if batch * heads <= most:
        return run(query, key, value, mask, spec)
    dim, step = (0, max(1, most // heads)) if batch > 1 else (1, most)
    if dim and spec.grouped and key.shape[1] != heads:
        raise UsageError(f"{heads} query heads that share key heads exceed the limit of {most}")

    def part(tensor: Tensor, start: int) -> Tensor:
        return tensor.narrow(dim, start, min(step, tensor.shape[dim] - start))

    def part_of_mask(start: int) -> Tensor | None:
        return mask if mask is None or mask.shape[dim] == 1 else part(mask, start)

    return torch.cat(
        [
            _in_parts(
                run,
                part(query, start),
                part(key, start),
                part(value, start),
                part_of_mask(start),
                spec,
                most,
            )
            for start in range(0, query.shape[dim], step)
        ],
        dim,
    )
