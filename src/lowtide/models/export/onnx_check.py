"""Comparison of an exported ONNX file with its model at sizes not traced."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch import Tensor, nn

from lowtide.attention.spatial.onnx_graph import IMAGE, RESULT
from lowtide.core.errors import ModelError
from lowtide.core.metrics import max_error, psnr
from lowtide.models.denoiser.denoiser import LeveledDenoiser
from lowtide.models.descriptor import SizeRule
from lowtide.models.export.write_onnx import EXAMPLE_SIDES, SIGMA
from lowtide.models.loaded_model import Model
from lowtide.models.onnx_runtime import (
    CannotRunError,
    open_session,
    require_packages,
    runtime_errors,
    short_reason,
)

# In fp32, for pixels in 0..1 or relative to the largest one where that is more; rounding in another
# order causes a hundredth of it.
LARGEST_DIFFERENCE = 1e-4
# Minimum PSNR of int8: a lower one is visible.
MIN_PSNR_DB = 40.0
# Factor by which a runtime may be further from fp32 than PyTorch is at the same low precision.
_MAX_ERROR_RATIO = 2
# Height and width: odd, smaller and larger than windows, in both directions, and more pixels than
# models with a special case for small images call small.
_SIZES = ((33, 50), (19, 61), (64, 80), (129, 131))
_TIMED_PAIRS = 3


@dataclass(frozen=True)
class SizeCheck:
    """Result of one comparison at a size in pixels.

    ``difference`` is the largest between the file's result and that of the model in fp32, on a
    scale of 0..1; ``bound`` is its limit. ``sigma`` is the level that a denoiser was given.

    In fp16 and bf16 ``pytorch_difference`` is that of PyTorch at the same precision, and
    ``psnr_db`` the PSNR of the file against fp32, infinity where it is equal; both are None in
    fp32. In int8, which PyTorch does not have, the difference has no limit (``bound`` is None) but
    ``psnr_db`` must be at least ``min_psnr_db``.
    """

    height: int
    width: int
    difference: float
    bound: float | None
    pytorch_difference: float | None = None
    psnr_db: float | None = None
    min_psnr_db: float | None = None
    sigma: float | None = None

    @property
    def passed(self) -> bool:
        """Whether the difference is within the bound, or the PSNR high enough; NaN fails."""
        if self.bound is not None:
            return self.difference <= self.bound
        return (self.psnr_db or 0.0) >= (self.min_psnr_db or 0.0)


class OnnxRunner:
    """ONNX Runtime on the CPU as a callable, with PyTorch's number of threads.

    Raises `CannotRunError` where the runtime refuses the file, and `UsageError` where the package
    onnxruntime is missing.
    """

    def __init__(self, path: Path | str) -> None:
        require_packages("onnxruntime")
        self._session = open_session(path, torch.get_num_threads(), memory_patterns=True)

    def __call__(self, image: Tensor, sigma: float | None = None) -> Tensor:
        """Run the file on an fp32 image (1, C, H, W), that of a denoiser at a level in 0..1."""
        inputs = {IMAGE: image.numpy()}
        if sigma is not None:
            inputs[SIGMA] = np.array([sigma], np.float32)
        try:
            (found,) = self._session.run([RESULT], inputs)
        except runtime_errors() as error:
            height, width = image.shape[2:]
            raise CannotRunError(f"at {width}×{height}: {short_reason(error)}") from error
        return torch.from_numpy(np.asarray(found))


def checked_sizes(rule: SizeRule) -> tuple[tuple[int, int], ...]:
    """Return the (height, width) pairs to compare: allowed by ``rule``, never traced."""
    traced = _allowed(EXAMPLE_SIDES, rule)
    sizes = (_allowed(size, rule) for size in _SIZES)
    return tuple(dict.fromkeys(size for size in sizes if size != traced))


def compare_fp32(
    run: OnnxRunner, model: Model, network: nn.Module, size: tuple[int, int]
) -> SizeCheck:
    """Compare the file with ``model`` in fp32 on an image of ``size`` (height, width).

    ``network`` is what was exported: that of the model, or its copy in a lower precision, whose own
    error sets the bound. Raises `ModelError` where the result has another shape, and
    `CannotRunError` where the runtime fails at this size.
    """
    image, sigma = random_image(model, size), _level(model, size)
    if sigma is not None:
        assert isinstance(model.module, LeveledDenoiser)
        model.module.set_level(sigma)
    with torch.inference_mode():
        expected = model.module(image)
        own = expected if network is model.module else network(image)
    found = _result(run, image, expected, sigma)
    difference = max_error(found.numpy(), expected.numpy())
    rounding = LARGEST_DIFFERENCE * _scale(expected)
    if network is model.module:
        return SizeCheck(*size, difference, rounding, sigma=sigma)
    own_difference = max_error(own.numpy(), expected.numpy())
    # A model that overflows at this precision must not raise the bound to infinity.
    allowed = _MAX_ERROR_RATIO * own_difference if math.isfinite(own_difference) else 0.0
    bound = max(rounding, allowed)
    decibels = psnr(found.numpy(), expected.numpy())
    return SizeCheck(*size, difference, bound, own_difference, decibels)


def _scale(expected: Tensor) -> float:
    """Return the largest pixel, at least 1, since rounding errors are relative.

    1 for a result that is not finite.
    """
    largest = expected.abs().max().item()
    return max(1.0, largest) if math.isfinite(largest) else 1.0


def compare_int8(run: OnnxRunner, model: Model, image: Tensor) -> SizeCheck:
    """Compare an int8 file with ``model`` in fp32 on ``image``.

    ``image`` is fp32 (1, C, H, W) in 0..1 and should not be one of the calibration images. Raises
    as `compare_fp32`.
    """
    with torch.inference_mode():
        expected = model.module(image)
    found = _result(run, image, expected)
    height, width = image.shape[2:]
    return SizeCheck(
        height,
        width,
        max_error(found.numpy(), expected.numpy()),
        None,
        psnr_db=psnr(found.numpy(), expected.numpy()),
        min_psnr_db=MIN_PSNR_DB,
    )


def _level(model: Model, size: tuple[int, int]) -> float | None:
    """Return the level of a denoiser to compare at: another for each size; else None."""
    if not isinstance(model.module, LeveledDenoiser):
        return None
    sizes = checked_sizes(model.descriptor.size)
    return model.module.config.max_sigma * sizes.index(size) / (len(sizes) - 1)


def _result(run: OnnxRunner, image: Tensor, expected: Tensor, sigma: float | None = None) -> Tensor:
    """Run the file on ``image`` and check that its result has the expected shape."""
    found = run(image, sigma)
    if found.shape != expected.shape:
        height, width = image.shape[2:]
        raise ModelError(
            f"the exported file returns {tuple(found.shape)} for {width}×{height} pixels,"
            f" PyTorch {tuple(expected.shape)}"
        )
    return found


def cpu_seconds(
    run: OnnxRunner, model: Model, network: nn.Module, size: tuple[int, int]
) -> tuple[float, float]:
    """Measure CPU seconds per image of ``size`` by ONNX Runtime and by PyTorch.

    ``size`` is (height, width), both run at the same precision. Medians of alternating pairs, after
    `compare_fp32` has warmed both up.
    """
    image, sigma = random_image(model, size), _level(model, size)
    once = run if sigma is None else functools.partial(run, sigma=sigma)
    pairs = [(_seconds(once, image), _seconds(network, image)) for _ in range(_TIMED_PAIRS)]
    return median(one for one, _ in pairs), median(other for _, other in pairs)


def random_image(model: Model, size: tuple[int, int]) -> Tensor:
    """Return noise in 0..1, (1, C, height, width), the same in every run."""
    source = torch.Generator().manual_seed(math.prod(size))
    return torch.rand(1, model.descriptor.in_channels, *size, generator=source)


@torch.inference_mode()
def _seconds(run: Callable[[Tensor], Tensor], image: Tensor) -> float:
    start = time.process_time()
    run(image)
    return time.process_time() - start


def _allowed(size: tuple[int, int], rule: SizeRule) -> tuple[int, int]:
    rows, columns = rule.padding(*size)
    return size[0] + rows, size[1] + columns
