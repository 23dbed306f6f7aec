"""Profiles, and what attention takes and holds on them."""

import weakref

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lowtide.attention.sdpa_rules import sdpa_kernel_for
from lowtide.attention.spec import AttentionCall
from lowtide.memory.profiles import load_profile
from lowtide.memory.profiles.simulated_device import simulate_attention

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
AMPERE, ADA, HOPPER, BLACKWELL, HOST = (
    load_profile(name) for name in ("rtx3060", "rtx4090", "h200", "rtx5070ti", "cpu")
)


def path(profile, *, dtype=BF16, head_dim=64, tokens=4096, **options):
    call = AttentionCall(
        dtype=dtype,
        head_dim=head_dim,
        query_tokens=tokens,
        key_tokens=options.pop("key_tokens", tokens),
        **options,
    )
    return sdpa_kernel_for(profile, call)


def qkv(shape=(1, 8, 256, 64), dtype=FP32, grad=False, value_dim=None):
    make = lambda size: torch.empty(size, dtype=dtype, requires_grad=grad)  # noqa: E731
    return make(shape), make(shape), make((*shape[:-1], value_dim or shape[-1]))


class Live(TorchDispatchMode):
    """Bytes of all storages alive, and the most there were."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.known, self.ops = set(), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.ops.append(func.__name__)
        for leaf in tree_leaves(result):
            storage = leaf.untyped_storage() if isinstance(leaf, torch.Tensor) else None
            if storage is not None and storage._cdata not in self.known:
                self.known.add(storage._cdata)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.gone, storage._cdata, storage.nbytes())
        return result

    def gone(self, key, size):
        self.known.discard(key)
        self.now -= size


def bytes_of(profile, shape, dtype, *, grad=False, mask=None, options=None):
    """(Kernel, peak forward, kept for backward, peak backward), above query, key and value."""
    with FakeTensorMode(), Live() as live, simulate_attention(profile) as log:
        tensors = qkv(shape, dtype, grad)
        bias = None if mask is None else torch.empty(mask, dtype=dtype)
        base = live.now
        out = F.scaled_dot_product_attention(*tensors, bias, **(options or {}))
        forward, kept, live.peak = live.peak - base, live.now - base, live.now
        assert out.shape == shape and out.dtype == dtype
        if grad:
            out.backward(torch.empty_like(out))
            assert [t.grad.shape for t in tensors] == [t.shape for t in tensors]
        (taken,) = log or ("cpu_flash",)
        return taken, forward, kept, live.peak - base
