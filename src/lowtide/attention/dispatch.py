"""Selection of an attention backend, with a reason for each one rejected."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from lowtide.attention.backends import BACKENDS, AttentionBackend, get_backend
from lowtide.attention.sdpa_rules import kernel_priority
from lowtide.attention.spec import AttentionCall, AttentionDevice, LocalDevice
from lowtide.attention.verify import verification_failure
from lowtide.core.errors import UsageError

Policy = Literal["auto", "prefer", "strict"]


@dataclass(frozen=True)
class BackendVerdict:
    """Whether one backend was chosen, and the reason.

    ``fix`` is how to make a rejected backend usable, if there is a way.
    """

    backend: str
    chosen: bool
    reason: str
    fix: str = ""


@dataclass(frozen=True)
class ResolvedBackend:
    """The backend chosen for one kind of call, with the verdict on every backend.

    ``max_heads`` is the most batches × heads that the backend gets in one launch, None for no
    limit. ``fallback`` is the reason why the requested backend was not chosen, None if it was.
    """

    backend: str
    verdicts: tuple[BackendVerdict, ...]
    max_heads: int | None = None
    fallback: str | None = None

    def explain(self) -> str:
        """Format one line per backend: the chosen one, then why not the others."""
        ordered = sorted(self.verdicts, key=lambda verdict: not verdict.chosen)
        width = max(len(verdict.backend) for verdict in ordered)
        return "\n".join(
            f"{'→' if verdict.chosen else ' '} {verdict.backend:<{width}}  {verdict.reason}"
            + (f"  ({verdict.fix})" if verdict.fix else "")
            for verdict in ordered
        )


def resolve(
    call: AttentionCall,
    device: AttentionDevice | None = None,
    *,
    backend: str | None = None,
    policy: Policy | None = None,
    verify: bool = True,
) -> ResolvedBackend:
    """Choose the backend for an attention call on a device.

    Args:
        call: what is computed; see `lowtide.attention.spec.describe_call`.
        device: by default the CPU of this machine.
        backend: name of the requested backend; required by ``"strict"`` and ``"prefer"``.
        policy: ``"strict"`` takes ``backend`` or raises; ``"prefer"`` takes it, or records why not
            and continues as ``"auto"``; ``"auto"`` takes the first backend that supports the whole
            call and was verified on that kind of device. By default ``"strict"`` with a backend and
            ``"auto"`` without.
        verify: whether to compare a backend with the reference on a few tokens before its first use
            for a kind of call. False for devices that are not in this machine.

    Raises:
        UsageError: unknown names, or no backend supports the call.
    """
    policy = policy or ("auto" if backend is None else "strict")
    if policy not in get_args(Policy):
        raise UsageError(f"policy {policy!r} is not known", hint="auto, prefer or strict")
    if (backend is None) != (policy == "auto"):
        raise UsageError(
            f"policy {policy!r} with {'no backend' if backend is None else f'backend {backend!r}'}",
            hint="name a backend with 'strict' and 'prefer', and none with 'auto'",
        )
    device = device or LocalDevice()
    requested = None if backend is None else get_backend(backend)
    verdicts: list[BackendVerdict] = []
    if requested is not None:
        problem = _rejection(requested, device, call, verify)
        if problem is None:
            verdicts = [
                BackendVerdict(requested.name, True, "requested"),
                *_others(requested, device, call),
            ]
            return ResolvedBackend(
                requested.name, tuple(verdicts), _max_heads(requested, device, call)
            )
        verdicts.append(problem)
        if policy == "strict":
            raise UsageError(
                f"attention backend {requested.name} does not support this call: {problem.reason}",
                hint=problem.fix or "policy='prefer' falls back to another and reports why",
            )
    return _first(device, call, verdicts, verify)


def _first(
    device: AttentionDevice, call: AttentionCall, verdicts: list[BackendVerdict], verify: bool
) -> ResolvedBackend:
    """Choose the first backend in order that supports the call and needs no request."""
    fallback = verdicts[0] if verdicts else None
    taken: AttentionBackend | None = None
    for candidate in backends_in_order(device):
        if fallback is not None and candidate.name == fallback.backend:
            continue
        if taken is not None:
            verdicts.append(_not_chosen(candidate, device, call))
        elif (problem := _rejection(candidate, device, call, verify, automatic=True)) is not None:
            verdicts.append(problem)
        else:
            taken = candidate
            verdicts.append(
                BackendVerdict(candidate.name, True, "the first that supports this call")
            )
    if taken is None:
        raise UsageError(
            "no attention backend supports this call: "
            + "; ".join(f"{verdict.backend}: {verdict.reason}" for verdict in verdicts)
        )
    said = None if fallback is None else f"{fallback.backend}: {fallback.reason}"
    return ResolvedBackend(taken.name, tuple(verdicts), _max_heads(taken, device, call), said)


def backends_in_order(device: AttentionDevice) -> Iterator[AttentionBackend]:
    """Yield all backends in order of preference on a device.

    PyTorch's fused kernels come first, in the order in which PyTorch itself tries them there.
    """
    fused = [f"sdpa-{path}" for path in kernel_priority(device)] if device.kind == "cuda" else []
    names = dict.fromkeys([*fused, *BACKENDS])
    return (BACKENDS[name] for name in names)


def _rejection(
    backend: AttentionBackend,
    device: AttentionDevice,
    call: AttentionCall,
    verify: bool,
    *,
    automatic: bool = False,
) -> BackendVerdict | None:
    """Return why ``backend`` is rejected, None if it can be chosen."""
    if (missing := backend.missing_requirement(device)) is not None:
        return BackendVerdict(backend.name, False, missing.reason, missing.fix)
    part = _largest_part(backend, device, call)
    if (reason := backend.unsupported_reason(device, part)) is not None:
        return BackendVerdict(backend.name, False, reason)
    if automatic and device.kind not in backend.verified_on:
        where = "a GPU" if device.kind == "cuda" else "the CPU"
        return BackendVerdict(backend.name, False, f"unverified on {where}; used only by name")
    if automatic and (reason := backend.not_preferred_reason(device, part)) is not None:
        return BackendVerdict(backend.name, False, reason)
    if verify and (reason := verification_failure(backend, device, call)) is not None:
        return BackendVerdict(backend.name, False, f"not used: {reason}")
    return None


def _not_chosen(
    backend: AttentionBackend, device: AttentionDevice, call: AttentionCall
) -> BackendVerdict:
    problem = _rejection(backend, device, call, False, automatic=True)
    return problem or BackendVerdict(
        backend.name, False, "supports it, but comes later in the order"
    )


def _others(
    requested: AttentionBackend, device: AttentionDevice, call: AttentionCall
) -> list[BackendVerdict]:
    return [
        _not_chosen(backend, device, call)
        for backend in backends_in_order(device)
        if backend is not requested
    ]


def _max_heads(
    backend: AttentionBackend, device: AttentionDevice, call: AttentionCall
) -> int | None:
    most = backend.max_heads(device, call)
    return most if most is not None and call.batch * call.heads > most else None


def _largest_part(
    backend: AttentionBackend, device: AttentionDevice, call: AttentionCall
) -> AttentionCall:
    """Return the call as the backend gets it after the split to its launch limits."""
    most = _max_heads(backend, device, call)
    if most is None:
        return call
    heads = min(call.heads, most)
    return dataclasses.replace(
        call,
        batch=max(1, most // call.heads),
        heads=heads,
        key_heads=heads if call.key_heads == call.heads else call.key_heads,
    )
