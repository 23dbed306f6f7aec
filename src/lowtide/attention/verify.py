"""Numerical verification of a backend before its first use for a kind of call.

It compares a few tokens with the reference. Kernels have been wrong for masks of another dtype, for
long masks, and in their gradients for one length in 128, each without an error. A trial takes
milliseconds, once per process.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.attention.backends import AttentionBackend, get_backend
from lowtide.attention.spec import AttentionCall, AttentionDevice, AttentionSpec

# A multiple of 128 plus one tile of 64, and an odd length, as in window attention.
_TOKENS = 64, 83
# Allowed error relative to that of PyTorch's plain operators in the same dtype.
_TOLERANCE_FACTORS = {
    torch.float64: 10.0,
    torch.float32: 10.0,
    torch.bfloat16: 4.0,
    torch.float16: 4.0,
}
# Least error allowed, where the plain operators happen to have none: the roundings of a sum of a
# few dozen terms.
_ROUNDINGS = 8
_EIGHT_BITS = 64.0  # for backends with 8-bit scores
_NAMES = "its result", *(f"the {name}'s gradient" for name in ("query", "key", "value", "mask"))


def verification_failure(
    backend: AttentionBackend, device: AttentionDevice, call: AttentionCall
) -> str | None:
    """Return why ``backend`` fails a trial of this kind of call, None if it passes.

    Runs on ``device``, forward and, if gradients are needed, backward. Dropout is left out, since
    its results cannot be compared.
    """
    if backend.name in ("reference", "sdpa-math"):  # the references themselves
        return None
    kind = AttentionCall(
        call.dtype,
        call.head_dim,
        _TOKENS[1] if call.is_causal else _TOKENS[0],
        _TOKENS[1],
        call.value_dim,
        call.has_mask,
        call.mask_is_boolean,
        call.mask_needs_grad,
        call.needs_grad,
        call.is_causal,
        batch=2,
        heads=2,
        key_heads=1 if call.is_grouped else 2,
    )
    return _trial_failure(backend.name, device.kind, device.capability, kind)


@functools.lru_cache(maxsize=1024)
def _trial_failure(
    name: str, device: str, capability: tuple[int, int], call: AttentionCall
) -> str | None:
    generator = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> Tensor:
        made = torch.randn(shape, generator=generator).to(device, call.dtype)
        return made.requires_grad_(call.needs_grad)

    # Hide the trial from the caller's dispatch modes, hooks and autocast.
    with (
        _disable_current_modes(),
        torch._C.DisableTorchFunction(),
        torch.inference_mode(False),
        torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is),
        torch.set_grad_enabled(call.needs_grad or call.mask_needs_grad),
        torch.autocast(device, enabled=False),
    ):
        tensors = [
            rand(2, 2, call.query_tokens, call.head_dim),
            rand(2, call.key_heads or 2, call.key_tokens, call.head_dim),
            rand(2, call.key_heads or 2, call.key_tokens, call.value_dim),
        ]
        if call.has_mask:
            mask = rand(1, 2, call.query_tokens, call.key_tokens).detach()
            learned = mask.requires_grad_(call.mask_needs_grad)
            tensors.append(mask > -1 if call.mask_is_boolean else learned)
        spec = AttentionSpec(causal=call.is_causal, grouped=call.is_grouped)
        try:
            found = _results(get_backend(name), tensors, spec)
        except RuntimeError as error:
            return f"its first use failed ({str(error).partition(chr(10))[0]})"
        doubled = [
            t if t.dtype == torch.bool else t.detach().double().requires_grad_(t.requires_grad)
            for t in tensors
        ]
        exact = _results(get_backend("reference"), doubled, spec)
        plain = _results(get_backend("sdpa-math"), tensors, spec)
        allowed = _EIGHT_BITS if name == "sage" else _TOLERANCE_FACTORS[call.dtype]
        for what, one, other, wanted in zip(_NAMES, found, plain, exact, strict=False):
            error, usual = _worst(one, wanted), _worst(other, wanted)
            floor = _ROUNDINGS * torch.finfo(call.dtype).eps * float(wanted.detach().abs().max())
            if not error <= allowed * max(usual, floor):
                return f"in a trial {what} is off by {error:.1e}, plain operators by {usual:.1e}"
    return None


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _results(backend: AttentionBackend, tensors: list[Tensor], spec: AttentionSpec) -> list[Tensor]:
    """Return the result and the gradients of all tensors that require one."""
    query, key, value, *rest = tensors
    result = backend.run(query, key, value, rest[0] if rest else None, spec)
    learning = [tensor for tensor in tensors if tensor.requires_grad]
    if not learning:
        return [result]
    ramp = torch.linspace(-1, 1, result.numel(), device=result.device).view(result.shape)
    return [result, *torch.autograd.grad(result, learning, ramp.to(result.dtype))]


def _worst(found: Tensor, wanted: Tensor) -> float:
    error = (found.detach().double() - wanted.detach().double()).abs().max()
    return float(error.nan_to_num(nan=torch.inf))
