"""Validation metrics, and the memory of those that run a network."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lowtide.core.errors import BudgetError, UsageError
from lowtide.core.heap import heap_is_tuned, trimming_heap
from lowtide.core.metrics import SSIM_WINDOW, psnr, psnr_y, ssim, ssim_y
from lowtide.core.units import format_bytes
from lowtide.memory.prediction.estimate import estimate
from lowtide.memory.tracing.steps import InferenceStep
from lowtide.training.perceptual_metrics import PerceptualMetric
from lowtide.training.tasks.sr_config import Metric, SrConfig

if TYPE_CHECKING:
    from torch import Tensor


class ValidationMetrics:
    """Metrics of ``val.metrics`` on 8-bit images, (H, W, 3) each.

    PSNR and SSIM are of the luma unless ``test_y_channel`` is false, without a border as wide as
    the scale. LPIPS and DISTS are of RGB in 0..1 and of the whole image, on the CPU.
    ``crop_border`` overrides the border.

    Raises:
        UsageError: Weights of a metric do not fit.
    """

    def __init__(self, config: SrConfig) -> None:
        self._scale, self._metrics = config.scale, config.val.metrics
        self._perceptual = {
            name: PerceptualMetric(metric.type, metric.weights, metric.net)
            for name, metric in self._metrics.items()
            if metric.type in ("lpips", "dists") and metric.weights is not None
        }

    def compute(self, result: np.ndarray, reference: np.ndarray) -> dict[str, float]:
        """Return each metric of an upscaled image against the original, by name.

        Both are uint8 (H, W, 3) of the same size.
        """
        return {
            name: self._perceptual_score(name, result, reference)
            if name in self._perceptual
            else _pixel_score(metric, self._border(metric), result, reference)
            for name, metric in self._metrics.items()
        }

    def check_images(self, images: Iterable[tuple[Path, tuple[int, int]]], budget: int) -> None:
        """Check before anything runs that every metric can be computed on these images.

        Args:
            images: (file, (H, W)) of each image.
            budget: Bytes for a learned metric.

        Raises:
            UsageError: An image is too small for a metric.
            BudgetError: A learned metric takes more than ``budget`` bytes on an image.
        """
        import torch

        known = list(images)
        for name, metric in self._metrics.items():
            need = self._min_side(name) + 2 * self._border(metric)
            for path, size in known:
                if min(size) < need:
                    raise UsageError(
                        f"{path}: {size[1]}×{size[0]} is too small for val.metrics.{name}, which"
                        f" needs {need} pixels"
                    )
        for name, network in self._perceptual.items():
            border = 2 * self._border(self._metrics[name])
            path, size = max(known, key=lambda one: one[1][0] * one[1][1])
            picture = torch.empty(1, 3, *(side - border for side in size), device="meta")
            heap = "trim" if heap_is_tuned() else None  # see `_perceptual_score`
            step = InferenceStep((picture, picture))
            need = estimate(network, step, heap=heap).upper_bytes
            if need > budget:
                raise BudgetError(
                    f"val.metrics.{name} of {path} ({size[1]}×{size[0]}) takes up to"
                    f" {format_bytes(need)} of {format_bytes(budget)}",
                    smallest=need,
                    hint="leave it out, or validate with smaller images",
                )

    def _min_side(self, name: str) -> int:
        """Return the smallest side in pixels that the metric takes, without borders."""
        if name in self._perceptual:
            return self._perceptual[name].min_side
        return SSIM_WINDOW if self._metrics[name].type == "ssim" else 1

    def _border(self, metric: Metric) -> int:
        if metric.crop_border is not None:
            return metric.crop_border
        return 0 if metric.is_learned else self._scale

    def _perceptual_score(self, name: str, *images: np.ndarray) -> float:
        import torch

        border = self._border(self._metrics[name])
        with trimming_heap(), torch.inference_mode():
            return float(self._perceptual[name](*_tensors(images, border)))


def _tensors(images: Iterable[np.ndarray], border: int) -> Iterator[Tensor]:
    """Yield images as (1, 3, H, W) in 0..1, without their borders."""
    import torch

    for picture in images:
        inner = torch.from_numpy(_crop_border(picture, border).copy()).permute(2, 0, 1)
        yield inner[None].float() / 255


def _crop_border(image: np.ndarray, border: int) -> np.ndarray:
    height, width = image.shape[:2]
    return image[border : height - border, border : width - border]


def _pixel_score(metric: Metric, border: int, result: np.ndarray, reference: np.ndarray) -> float:
    if metric.test_y_channel:
        return {"psnr": psnr_y, "ssim": ssim_y}[metric.type](result, reference, border)
    figure = {"psnr": psnr, "ssim": ssim}[metric.type]
    return figure(_crop_border(result, border), _crop_border(reference, border), peak=255.0)
