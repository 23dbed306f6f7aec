"""Routing of third-party modules' scaled_dot_product_attention to backends.

Nothing outside the module changes: calls of PyTorch's scaled_dot_product_attention are intercepted
only while the module's forward pass runs, and only in that thread.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lowtide.attention.backends import get_backend
from lowtide.attention.dispatch import Policy
from lowtide.attention.functional import attention, describe_tensors, resolve_cached
from lowtide.attention.spec import AttentionSpec, LocalDevice

# Per thread: the routers that are entered, and whether one of them is computing.
_THREAD = threading.local()


def use(
    module: nn.Module, backend: str | None = None, *, policy: Policy | None = None
) -> RoutedAttention:
    """Route all attention inside ``module`` through `attention` until it is removed.

    ::

        with lowtide.attention.use(vae, backend="chunked") as used:
            image = vae.decode(latent).sample
        print(used.report())

    Every call of ``torch.nn.functional.scaled_dot_product_attention`` during the forward pass is
    intercepted. This works for diffusers, transformers with ``sdpa`` and
    ``torch.nn.MultiheadAttention``. Attention written as explicit matrix products cannot be
    intercepted; the report then says that there was no call. Other modules, other threads and
    global settings stay the same. Remove it before pickling the module.

    Args:
        module: the module, with all its submodules.
        backend: name of the preferred backend; by default the first that supports each call.
        policy: ``"strict"`` raises where ``backend`` does not support a call; by default another
            backend is the fallback, and the report says why.

    Raises:
        UsageError: unknown names.
    """
    router = AttentionRouter(backend, policy)
    handles = []
    # Hooks on every submodule, so that one recomputed on its own (checkpointing) is routed, too.
    for part in module.modules():
        handles.append(part.register_forward_pre_hook(router.enter))
        handles.append(part.register_forward_hook(router.leave, always_call=True))
    return RoutedAttention(router, handles)


class RoutedAttention:
    """Handle of routed attention: `report` says what ran, `remove` undoes the routing."""

    def __init__(self, router: AttentionRouter, handles: list[Any]) -> None:
        self._router, self._handles = router, handles

    @property
    def calls(self) -> dict[str, int]:
        """Number of calls per backend."""
        counts: Counter[str] = Counter()
        for (backend, _), count in self._router.call_counts.items():
            counts[backend] += count
        return dict(counts)

    def report(self) -> str:
        """Format one line per backend that ran, with the reason if it is a fallback."""
        if not self._router.call_counts:
            return "no attention was intercepted: the module did not run, or computes it explicitly"
        return "\n".join(
            f"{count} × {backend}" + (f", not {why}" if why else "")
            for (backend, why), count in self._router.call_counts.most_common()
        )

    def remove(self) -> None:
        """Remove all hooks from the module."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __enter__(self) -> RoutedAttention:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class AttentionRouter:
    """Intercepts attention calls between `enter` and `leave`, and counts them."""

    def __init__(self, backend: str | None, policy: Policy | None) -> None:
        if backend is not None:
            get_backend(backend)
        self.backend = backend
        # Others wrote the calls: one that the backend does not support falls back.
        self.policy: Policy = policy or ("auto" if backend is None else "prefer")
        self.call_counts: Counter[tuple[str, str]] = Counter()

    def enter(self, module: nn.Module, _: Any) -> None:
        """Start intercepting at the outermost module: a forward pre-hook."""
        entered = self._entered()
        if not entered.parts:
            entered.mode = _RouterMode(self)
            entered.mode.__enter__()
        entered.parts.append(module)

    def leave(self, module: nn.Module, *_: Any) -> None:
        """Stop intercepting after the outermost module, also on errors: a forward hook."""
        entered = self._entered()
        if not entered.parts or entered.parts[-1] is not module:
            return  # another hook failed before `enter`
        entered.parts.pop()
        if not entered.parts and entered.mode is not None:
            entered.mode.__exit__(None, None, None)
            del _THREAD.entered[id(self)]  # another router may get the same id

    def _entered(self) -> _Entered:
        known: dict[int, _Entered] = _THREAD.__dict__.setdefault("entered", {})
        return known.setdefault(id(self), _Entered())

    def compute(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Compute scaled_dot_product_attention with PyTorch's parameters and shapes.

        Query, key and value are (..., heads, N, head dim) or (..., N, head dim) and are broadcast
        to the same leading dimensions.
        """
        query, key, value, attn_mask = cast_as_autocast(query, key, value, attn_mask)
        inner = 3 if enable_gqa else 2
        lead = torch.broadcast_shapes(*(t.shape[:-inner] for t in (query, key, value)))
        missing = max(0, 4 - inner - len(lead))
        query, key, value = (
            t.expand(*lead, *t.shape[-inner:])[(None,) * missing] for t in (query, key, value)
        )
        spec = AttentionSpec(scale, is_causal, dropout_p, enable_gqa)
        call = describe_tensors(query, key, value, attn_mask, spec)
        found = resolve_cached(call, LocalDevice.of(query.device), self.backend, self.policy)
        self.call_counts[found.backend, found.fallback or ""] += 1
        result = attention(query, key, value, attn_mask, spec, resolution=found)
        return result[(0,) * missing]


def cast_as_autocast(query: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    """Cast tensors of attention, of any shape, as autocast would for PyTorch's function.

    Autocast recognizes that function by name, and so does not cast for this one.
    """
    place = query.device.type
    if not torch.is_autocast_enabled(place):
        return query, *others
    dtype = torch.get_autocast_dtype(place)
    return tuple(
        t.to(dtype) if t is not None and t.is_floating_point() and t.dtype != torch.float64 else t
        for t in (query, *others)
    )


class _Entered:
    """Submodules of one router that run in this thread, outermost first."""

    def __init__(self) -> None:
        self.parts: list[nn.Module] = []
        self.mode: _RouterMode | None = None


class _RouterMode(TorchFunctionMode):
    """Torch function mode that passes attention calls to an `AttentionRouter`."""

    def __init__(self, router: AttentionRouter) -> None:
        super().__init__()
        self._router = router

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(_THREAD, "busy", False):
            return func(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            # A torch function mode sees this function as a whole, not the calls inside it. Its copy
            # must not be intercepted again.
            names = dict(
                scaled_dot_product_attention=self._compute, has_torch_function=lambda _: False
            )
            return copy_with_globals(func, names)(*args, **kwargs)
        return (self._compute if func is F.scaled_dot_product_attention else func)(*args, **kwargs)

    def _compute(self, *args: Any, **kwargs: Any) -> Tensor:
        _THREAD.busy = True  # backends may call the same function
        try:
            return self._router.compute(*args, **kwargs)
        finally:
            _THREAD.busy = False


def copy_with_globals(function: FunctionType, names: dict[str, Any]) -> FunctionType:
    """Copy ``function`` with ``names`` overriding its module's globals."""
    copy = FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
