"""Validate weights during training on whole images, upscaled as at inference."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lowtide.core.atomic_file import atomic_output, make_folder, remove_part_files
from lowtide.core.errors import BudgetError, InputError, UsageError
from lowtide.core.heap import heap_is_tuned, trimming_heap
from lowtide.core.metrics import SSIM_WINDOW, psnr, psnr_y, ssim, ssim_y
from lowtide.core.units import format_bytes
from lowtide.jobs.train.validation_runs import ValidationRunner
from lowtide.jobs.upscale.job import UpscaleJob
from lowtide.jobs.upscale.settings import UpscaleSettings
from lowtide.memory.budget import Budget
from lowtide.memory.prediction.estimate import estimate
from lowtide.memory.tracing.steps import InferenceStep
from lowtide.models.resample import resize_cubic
from lowtide.training.data.image_cache import read_rgb
from lowtide.training.data.pairs import HighResolutionFolders, PairedImageFolders
from lowtide.training.losses.perceptual import PerceptualMetric
from lowtide.training.setup import save_weights
from lowtide.training.tasks.sr_config import MetricEntry, SrConfig

if TYPE_CHECKING:
    from torch import Tensor, nn


class ImageMetrics:
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

    def _border(self, metric: MetricEntry) -> int:
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


def _pixel_score(
    metric: MetricEntry, border: int, result: np.ndarray, reference: np.ndarray
) -> float:
    if metric.test_y_channel:
        return {"psnr": psnr_y, "ssim": ssim_y}[metric.type](result, reference, border)
    figure = {"psnr": psnr, "ssim": ssim}[metric.type]
    return figure(_crop_border(result, border), _crop_border(reference, border), peak=255.0)


_WEIGHTS = "validated"
TrainImages = PairedImageFolders | HighResolutionFolders


class UpscaleValidator:
    """Upscale the validation images with given weights, within ``val.budget``.

    No image is downsized to fit: `lowtide.upscale` runs it whole, in bands or in tiles, exactly.
    """

    def __init__(self, config: SrConfig, data: TrainImages, folder: Path, device: str) -> None:
        self._config, self._folder = config, folder
        self._device, self._runs = device, ValidationRunner(UpscaleJob, device)
        self._pairs = list(self._image_pairs(data))
        stems = [low.stem for low, _ in self._pairs]
        # Folders may hold images of the same name.
        self._names = [
            stem if stems.count(stem) == 1 else f"{index}_{stem}"
            for index, stem in enumerate(stems)
        ]
        self._metrics = ImageMetrics(config)
        # Learned metrics run on the CPU, even where the model runs on a GPU.
        host = Budget.parse(config.val.budget if device == "cpu" else "auto")
        sizes = [(low, (high.shape[0], high.shape[1])) for low, high in self._pairs]
        self._metrics.check_images(sizes, host.device_bytes)

    @property
    def lower_is_better(self) -> bool:
        """Whether the first metric is a distance."""
        return next(iter(self._config.val.metrics.values())).is_learned

    @property
    def conditions(self) -> dict[str, Any]:
        """The first metric and the validation images."""
        config = self._config.model_dump(mode="json")
        metric = next(iter(config["val"]["metrics"].values()))
        return {"metric": metric, "pictures": config["datasets"]["val"]}

    def __call__(self, network: nn.Module, step: int) -> dict[str, float]:
        """Return the mean scores of ``network`` after ``step`` steps, by metric name."""
        weights = save_weights(
            self._folder / "models" / f"{_WEIGHTS}.safetensors", network, self._config
        )
        sums = dict.fromkeys(self._config.val.metrics, 0.0)
        targets = [self._target(name, step) for name in self._names]
        settings = UpscaleSettings.of(
            model=str(weights), device=self._device, budget=self._config.val.budget
        )
        lows = (low for low, _ in self._pairs)
        self._runs(weights, [(settings, zip(lows, targets, strict=True))])
        for target, (_, high) in zip(targets, self._pairs, strict=True):
            for name, figure in self._metrics.compute(self._read_result(target), high).items():
                sums[name] += figure
        return {name: total / len(self._pairs) for name, total in sums.items()}

    def _target(self, name: str, step: int) -> Path:
        target = self._folder / "visualization" / name / f"{name}_{step}.png"
        make_folder(target.parent)
        remove_part_files(target)
        return target

    def _read_result(self, target: Path) -> np.ndarray:
        made = _eight_bits(read_rgb(target))
        if not self._config.val.save_img:
            target.unlink()
        return made

    def _image_pairs(self, data: TrainImages) -> Iterator[tuple[Path, np.ndarray]]:
        """Yield (low-resolution file, high-resolution image) pairs.

        Low-resolution files are made once.
        """
        scale = self._config.scale
        for index in range(len(data)):
            path = data.path(index)
            image = _eight_bits(read_rgb(path))
            if isinstance(data, PairedImageFolders):
                yield data.low_path(index), image
                continue
            height, width = (side // scale * scale for side in image.shape[:2])
            if not height or not width:
                raise InputError(f"{path}: {image.shape[1]}×{image.shape[0]} is too small")
            high = image[:height, :width]
            low = self._folder / "validation" / f"{index}_{path.stem}.png"
            _write(low, resize_cubic(high, height // scale, width // scale))
            yield low, high


def _eight_bits(image: np.ndarray) -> np.ndarray:
    """Round to 8 bits as the metrics' protocols do."""
    return image if image.dtype == np.uint8 else (image / 257).round().astype(np.uint8)


def _write(path: Path, image: np.ndarray) -> None:
    import pyvips

    make_folder(path.parent)
    remove_part_files(path)
    with atomic_output(path) as part:
        pyvips.Image.new_from_array(image).pngsave(str(part), compression=3)
