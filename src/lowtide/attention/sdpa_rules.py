"""Predict which kernel PyTorch's scaled_dot_product_attention selects, and why.

The conditions are those of PyTorch's own selection, in aten/src/ATen/native/transformers
(cuda/sdp_utils.cpp and sdp_utils_cpp.cpp) of releases 2.8 to 2.15, restated as one table of
refusals per kernel. Nested tensors and AMD GPUs are not covered.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Literal

import torch
from packaging.version import Version
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.attention.spec import AttentionCall, AttentionDevice

AttentionPath = Literal["flash", "efficient", "cudnn", "math", "cpu_flash"]

_HALF = (torch.float16, torch.bfloat16)
# The cuDNN versions of PyTorch's wheels before and from 2.11 on, for builds without cuDNN.
_BUNDLED_CUDNN = (91002, 91900)


def sdpa_kernel_for(device: AttentionDevice, call: AttentionCall) -> AttentionPath:
    """Return the kernel that PyTorch selects for ``call`` on ``device``."""
    if device.kind == "cpu":
        return "math" if kernel_unsupported_reason("cpu_flash", device, call) else "cpu_flash"
    for path in kernel_priority(device):
        if kernel_unsupported_reason(path, device, call) is None:
            return path
    return "math"


def kernel_priority(device: AttentionDevice) -> tuple[AttentionPath, ...]:
    """Return a CUDA device's fused kernels, in the order PyTorch tries them."""
    if prefers_cudnn(device.capability, torch_release(), cudnn_version()):
        return "cudnn", "flash", "efficient"
    # Otherwise cuDNN comes after math, which never refuses.
    return "flash", "efficient"


def prefers_cudnn(capability: tuple[int, int], release: Version, cudnn: int) -> bool:
    """Return whether PyTorch tries cuDNN first.

    It does on data center Hopper and Blackwell GPUs, by version. ``cudnn`` is a version such as
    91900 for 9.19.0. 2.8 never does; the thresholds are those of pytorch#162073 in 2.9 and of
    pytorch#169849 since.
    """
    if capability[0] not in (9, 10) or release < Version("2.9"):
        return False
    return cudnn >= 90900 if release < Version("2.10") else cudnn > 91500


def torch_release() -> Version:
    """Return PyTorch's release, without what names the build."""
    return Version(Version(torch.__version__).base_version)


@cache
def cudnn_version() -> int:
    """Return PyTorch's cuDNN version, or its wheels' version in builds without cuDNN."""
    if torch.backends.cudnn.is_available() and (version := torch.backends.cudnn.version()):
        return version
    return _BUNDLED_CUDNN[torch_release() >= Version("2.11")]


@cache
def promotes_three_dimensions() -> bool:
    """Return whether this PyTorch runs 3-dimensional attention as one batch of heads.

    Queried from PyTorch itself on the CPU: pytorch#192271 changed it for every device. A fake
    tensor would give the answer of the meta device, which has no fused kernel.
    """
    with _disable_current_modes():
        three = torch.empty(1, 2, 8)
        choice = torch.ops.aten._fused_sdp_choice(three, three, three)
    return choice == SDPBackend.FLASH_ATTENTION.value


def kernel_unsupported_reason(
    path: AttentionPath, device: AttentionDevice, call: AttentionCall
) -> str | None:
    """Return why PyTorch's kernel ``path`` refuses ``call``, None if it accepts."""
    if path == "math":
        return None
    if path != "cpu_flash" and path not in call.enabled:
        return "it is disabled"
    rules = (*_SHARED, *_RULES[path])
    return next((reason for reason, refuses in rules if refuses(device, call)), None)


_Rule = tuple[str, Callable[[AttentionDevice, AttentionCall], bool]]


def _backward_is_missing(device: AttentionDevice, call: AttentionCall) -> bool:
    major, minor = device.capability
    small = (major == 8 and 6 <= minor <= 9) or (major == 12 and minor <= 1)
    fits = call.head_dim <= 192 or (call.head_dim > 224 and call.dropout == 0)
    return call.needs_grad and small and not fits


def _is_misaligned(device: AttentionDevice, call: AttentionCall) -> bool:
    half = call.dtype in _HALF
    if device.capability >= (8, 0):
        multiple = 8 if half else 4
    else:
        multiple = 8 if half and device.capability >= (7, 0) else 1
    return bool(call.head_dim % multiple or call.value_dim % multiple)


def _is_too_wide_for_cudnn(device: AttentionDevice, call: AttentionCall) -> bool:
    cudnn = cudnn_version()
    dims = call.head_dim, call.value_dim
    if device.capability == (9, 0) or device.capability[0] == 10:
        if cudnn > 92200:
            backward = max(dims) <= 128 or dims in ((192, 128), (256, 256))
            return max(dims) > 256 or (call.needs_grad and not backward)
        if cudnn >= 91100 and dims == (192, 128):
            return False
    return max(dims) > 128


def _is_outside(low: tuple[int, int]) -> Callable[[AttentionDevice, AttentionCall], bool]:
    return lambda device, _: not low <= device.capability <= (12, 1)


_SHARED: tuple[_Rule, ...] = (
    (
        "query, key and value need 4 dimensions",
        lambda _, c: c.dims != 4 and not (c.dims == 3 and promotes_three_dimensions()),
    ),
    ("there are no tokens", lambda _, c: not (c.query_tokens and c.key_tokens)),
    ("query, key and value differ in batch or heads", lambda _, c: not c.is_uniform),
    (
        "the last dimension is not contiguous",
        lambda _, c: not c.has_unit_stride and c.head_dim != 1,
    ),
)

_RULES: dict[AttentionPath, tuple[_Rule, ...]] = {
    "flash": (
        ("the compute capability is not 8.0 to 12.1", _is_outside((8, 0))),
        ("there is a mask", lambda _, c: c.has_mask),
        ("query and value differ in head dimension", lambda _, c: c.head_dim != c.value_dim),
        ("the head dimension is over 256", lambda _, c: c.head_dim > 256),
        (
            "the backward pass does not support this head dimension on this GPU",
            _backward_is_missing,
        ),
        (
            "causal with unequal numbers of tokens",
            lambda _, c: c.is_causal and c.query_tokens != c.key_tokens,
        ),
        ("the dtype is not fp16 or bf16", lambda _, c: c.dtype not in _HALF),
    ),
    "efficient": (
        ("the compute capability is not 5.0 to 12.1", _is_outside((5, 0))),
        ("a head dimension is not a multiple of 16 bytes", _is_misaligned),
        (
            "a tensor does not begin at a multiple of 16 bytes",
            lambda p, c: p.capability >= (8, 0) and not c.is_aligned,
        ),
        ("several query heads share a key head", lambda _, c: c.is_grouped),
        ("the dtype is fp64", lambda _, c: c.dtype not in (*_HALF, torch.float32)),
        (
            "bf16 needs compute capability 8.0",
            lambda p, c: c.dtype == torch.bfloat16 and p.capability < (8, 0),
        ),
    ),
    "cudnn": (
        ("the compute capability is not 8.0 to 12.1", _is_outside((8, 0))),
        ("the dtype is not fp16 or bf16", lambda _, c: c.dtype not in _HALF),
        ("the mask needs a gradient", lambda _, c: c.has_mask and c.mask_needs_grad),
        ("the mask has neither 2 nor 4 dimensions", lambda _, c: not c.mask_fits),
        ("the dropout is not a multiple of 1/16", lambda _, c: c.dropout * 16 % 1 != 0),
        (
            "cuDNN 9.11 to 9.13 do not support dropout",
            lambda _, c: c.dropout > 0 and 91100 < cudnn_version() < 91400,
        ),
        ("there are over 65535 batches or heads", lambda _, c: max(c.batch, c.heads) > 65535),
        ("a head dimension is too large", _is_too_wide_for_cudnn),
        (
            "a head dimension is not a multiple of 8",
            lambda _, c: bool(c.head_dim % 8 or c.value_dim % 8),
        ),
        (
            "there is only one token",
            lambda _, c: c.key_tokens == 1 or (c.dropout > 0 and c.query_tokens == 1),
        ),
    ),
    "cpu_flash": (
        ("there is dropout", lambda _, c: c.dropout > 0),
        ("the mask needs a gradient", lambda _, c: c.has_mask and c.mask_needs_grad),
        ("the mask has neither 2 nor 4 dimensions", lambda _, c: not c.mask_fits),
        ("query and value differ in head dimension", lambda _, c: c.head_dim != c.value_dim),
        (
            "the dtype is not fp16, bf16, fp32 or fp64",
            lambda _, c: c.dtype not in (*_HALF, torch.float32, torch.float64),
        ),
    ),
}
