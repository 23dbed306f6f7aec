"""CUDA's autocast rules for a trace on fake CPU tensors.

Why: CUDA's list of operators that run in fp32 is longer than the CPU's. It has the
normalizations, softmax, powers and resizing, whose results are kept for the backward pass. By the
CPU's rules a diffusion U-Net would seem to need little more than half of its memory.

The rules are those of aten/src/ATen/autocast_mode.h in pytorch/pytorch, releases 2.8 to 2.15.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from lowtide.memory.profiles import DeviceProfile

_LOW_PRECISION = (torch.bfloat16, torch.float16)
# Python functions that call one of these operators are in the list under their own names.
_FP32_FUNCTIONS = frozenset(
    """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow square
    softplus layer_norm native_layer_norm group_norm norm normalize frobenius_norm nuclear_norm
    vector_norm linalg_vector_norm linalg_norm matrix_norm linalg_matrix_norm cosine_similarity
    poisson_nll_loss cosine_embedding_loss nll_loss hinge_embedding_loss kl_div l1_loss
    smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
    triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits cross_entropy
    gaussian_nll_loss dist pdist cdist renorm logsumexp interpolate upsample upsample_nearest
    upsample_bilinear grid_sample
    """.split()
)
# These get fp32 as the result's type instead, which needs no fp32 copy of their input.
_FP32_RESULT_FUNCTIONS = frozenset(
    {"softmax", "log_softmax", "softmin", "cumprod", "cumsum", "prod", "sum"}
)
# In the lists of some devices or releases only.
_FP32_FUNCTIONS_IF_REGISTERED = {"rms_norm": "aten::rms_norm"}
_DUNDER_NAMES = {
    "__pow__": "pow",
    "__rpow__": "pow",
    "__ipow__": "pow",
    "__rtruediv__": "reciprocal",
    "__rdiv__": "reciprocal",
}
# In fp32 on the CPU only: on CUDA they run in the type of their input.
_INPUT_DTYPE_FUNCTIONS = frozenset(
    """
    pad reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d replication_pad3d
    avg_pool3d max_pool3d adaptive_avg_pool3d adaptive_max_pool3d quantile nanquantile polar
    view_as_complex
    """.split()
)


@contextmanager
def simulate_autocast(profile: DeviceProfile) -> Iterator[None]:
    """Context in which CPU autocast on fake tensors follows ``profile``'s device.

    Put it around a whole trace, backward pass included: checkpointing runs operators again
    there. Nothing changes for the CPU, and without autocast. A Python function of PyTorch that
    is not in the list keeps the CPU's rules for what it calls.
    """
    if profile.kind == "cpu":
        yield
        return
    with _CudaAutocast():
        yield


class _CudaAutocast(TorchFunctionMode):
    """Function mode that runs the operators of CUDA's fp32 list in fp32.

    Those of the CPU's own list run in the type of their input.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not torch.is_autocast_enabled("cpu"):
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        name = _DUNDER_NAMES.get(name, name)
        if name in _FP32_FUNCTIONS or _is_registered(name):
            args, kwargs = tree_map_only(Tensor, _to_fp32, (args, kwargs))
        elif name in _FP32_RESULT_FUNCTIONS:
            kwargs = _with_fp32_dtype(args, kwargs)
        elif name not in _INPUT_DTYPE_FUNCTIONS:
            return func(*args, **kwargs)
        with torch.autocast("cpu", enabled=False):
            return func(*args, **kwargs)


def _to_fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _LOW_PRECISION else tensor


def _with_fp32_dtype(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Set the result type to fp32 in the keywords, unless the caller sets one."""
    tensor = next((arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)), None)
    has_dtype = kwargs.get("dtype") is not None or any(isinstance(arg, torch.dtype) for arg in args)
    if tensor is None or tensor.dtype not in _LOW_PRECISION or has_dtype:
        return kwargs
    return {**kwargs, "dtype": torch.float32}


def _is_registered(name: str) -> bool:
    full = _FP32_FUNCTIONS_IF_REGISTERED.get(name)
    return full is not None and torch._C._dispatch_has_kernel_for_dispatch_key(full, "AutocastCUDA")
