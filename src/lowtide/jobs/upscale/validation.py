"""Validate weights during training on whole images, upscaled as at inference."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lowtide.core.atomic_file import atomic_output, make_folder, remove_part_files
from lowtide.core.errors import InputError
from lowtide.jobs.train.metrics import ValidationMetrics
from lowtide.jobs.train.validation_runs import ValidationRuns
from lowtide.jobs.upscale.job import UpscaleJob
from lowtide.jobs.upscale.settings import UpscaleSettings
from lowtide.memory.budget import Budget
from lowtide.models.resample import resize_cubic
from lowtide.training.data.image_cache import read_rgb
from lowtide.training.data.pairs import HighResolutionFolders, PairedFolders
from lowtide.training.tasks.sr_config import SrConfig
from lowtide.training.weights import save_weights

if TYPE_CHECKING:
    from torch import nn

_WEIGHTS = "validated"
TrainImages = PairedFolders | HighResolutionFolders


class TrainValidation:
    """Upscale the validation images with given weights, within ``val.budget``.

    No image is downsized to fit: `lowtide.upscale` runs it whole, in bands or in tiles, exactly.
    """

    def __init__(self, config: SrConfig, data: TrainImages, folder: Path, device: str) -> None:
        self._config, self._folder = config, folder
        self._device, self._runs = device, ValidationRuns(UpscaleJob, device)
        self._pairs = list(self._image_pairs(data))
        stems = [low.stem for low, _ in self._pairs]
        # Folders may hold images of the same name.
        self._names = [
            stem if stems.count(stem) == 1 else f"{index}_{stem}"
            for index, stem in enumerate(stems)
        ]
        self._metrics = ValidationMetrics(config)
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
            if isinstance(data, PairedFolders):
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
