"""Validate a denoiser during training on whole photographs, denoised as at inference."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lowtide.core.atomic_file import atomic_output, make_folder, remove_part_files
from lowtide.core.metrics import psnr
from lowtide.core.philox import philox_generator
from lowtide.jobs.denoise.job import DenoiseJob
from lowtide.jobs.denoise.settings import DenoiseSettings
from lowtide.jobs.train.validation_runs import ValidationRunner
from lowtide.media import open_image
from lowtide.models.denoiser.noise_models import NoiseModel
from lowtide.models.denoiser.noise_table import NoiseSetting, NoiseTable
from lowtide.training.data.photographs import PhotographFolders
from lowtide.training.tasks.denoise_config import DenoiseConfig
from lowtide.training.tasks.denoising import NoiseModelSampler, save_denoiser

if TYPE_CHECKING:
    from torch import nn

_WEIGHTS = "validated"
_PURPOSE = 0x76616C6E  # "valn", in the keys of generators
_SHARES = 0.25, 0.5, 1.0  # of the range of levels, where there is no table
_SHOT = 0.5  # share of shot noise in those
_WHITE = 65_535


@dataclass(frozen=True)
class ValidationNoise:
    """Noise of a validation: its name in the scores, and what `lowtide denoise` is given."""

    name: str
    model: NoiseModel
    table: Path
    iso: int | None


class DenoiseValidator:
    """Denoise the validation photographs with given weights, within ``val.budget``.

    Noisy files of 16 bits are made once, at a few levels, by noise that depends on the seed alone.
    """

    lower_is_better = False

    def __init__(
        self,
        config: DenoiseConfig,
        pictures: PhotographFolders,
        noise: NoiseModelSampler,
        folder: Path,
        device: str,
    ) -> None:
        self._config, self._folder, self._device = config, folder, device
        self._pictures, self._runs = pictures, ValidationRunner(DenoiseJob, device)
        self._noises = validation_noises(config, noise, folder / "validation")
        for number, one in enumerate(self._noises):
            for index in range(len(pictures)):
                random = philox_generator(config.manual_seed, _PURPOSE, number + 1, index)
                _write(self._noisy(one, index), one.model.sample(self._clean(index), random))

    @property
    def conditions(self) -> dict[str, Any]:
        """The photographs, the noise and the steps."""
        values = self._config.model_dump(mode="json")
        return {
            "metric": "psnr",
            "pictures": values["datasets"]["val"],
            "noise": [one.model.model_dump() for one in self._noises],
            "steps": self._config.val.steps,
            "scheduler": self._config.network.scheduler,
        }

    def __call__(self, network: nn.Module, step: int) -> dict[str, float]:
        """Return the PSNR in dB of ``network`` after ``step`` steps: mean, and at each level."""
        weights = self._folder / "models" / f"{_WEIGHTS}.safetensors"
        save_denoiser(weights, network, self._config)
        runs = [(self._settings(weights, one), self._files(one, step)) for one in self._noises]
        self._runs(weights, runs)
        scores = {
            f"psnr_{one.name}": float(
                np.mean([self._score(index, target) for index, (_, target) in enumerate(files)])
            )
            for one, (_, files) in zip(self._noises, runs, strict=True)
        }
        return {"psnr": float(np.mean(list(scores.values()))), **scores}

    def _settings(self, weights: Path, noise: ValidationNoise) -> DenoiseSettings:
        return DenoiseSettings.of(
            model=str(weights),
            device=self._device,
            budget=self._config.val.budget,
            noise=noise.table,
            iso=noise.iso,
            steps=self._config.val.steps,
            seed=self._config.manual_seed,
        )

    def _files(self, noise: ValidationNoise, step: int) -> list[tuple[Path, Path]]:
        """Return (noisy, denoised) files."""
        files = []
        for index in range(len(self._pictures)):
            source = self._noisy(noise, index)
            target = self._folder / "visualization" / source.stem / f"{source.stem}_{step}.png"
            make_folder(target.parent)
            remove_part_files(target)
            files.append((source, target))
        return files

    def _score(self, index: int, target: Path) -> float:
        with open_image(target) as source:
            rows = source.read(0, source.info.height)
        if not self._config.val.save_img:
            target.unlink()
        made = np.moveaxis(rows, -1, 0) / _WHITE
        return psnr(made, self._clean(index).astype(np.float64))

    def _clean(self, index: int) -> np.ndarray:
        random = philox_generator(self._config.manual_seed, _PURPOSE, 0, index)
        return self._pictures.whole(index, random)

    def _noisy(self, noise: ValidationNoise, index: int) -> Path:
        stem = self._pictures.path(index).stem
        return self._folder / "validation" / f"{index}_{stem}_{noise.name}.png"


def validation_noises(
    config: DenoiseConfig, noise: NoiseModelSampler, folder: Path
) -> list[ValidationNoise]:
    """Return the noise of three levels, or of the lowest, a middle and the highest ISO.

    Tables of levels are written into ``folder``.
    """
    if noise.table is not None:
        path = Path(config.datasets.train.noise)
        low, high = noise.table.iso_range or (None, None)
        if low is None or high is None:
            return [ValidationNoise("camera", noise.table.at(), path, None)]
        isos = dict.fromkeys((low, round(math.sqrt(low * high)), high))
        return [ValidationNoise(f"iso{one}", noise.table.at(one), path, one) for one in isos]
    low, high = noise.levels
    made = []
    for share in _SHARES:
        level = low + share * (high - low)
        model = noise.at_level(level, _SHOT)
        setting = NoiseSetting(iso=None, parameters=model.model_dump())
        name = f"sigma{level * 255:.3g}"
        path = folder / f"{name}.json"
        make_folder(folder)
        remove_part_files(path)
        table = NoiseTable(camera=config.name, noise_model=noise.name, settings=(setting,))
        table.save(path)
        made.append(ValidationNoise(name, model, path, None))
    return made


def _write(path: Path, planes: np.ndarray) -> None:
    """Write planes (C, H, W) of values in 0..1 as a file of 16 bits."""
    import pyvips

    values = np.rint(planes.clip(0, 1) * _WHITE).astype(np.uint16)
    image = pyvips.Image.new_from_array(np.ascontiguousarray(np.moveaxis(values, 0, -1)))
    kind = "rgb16" if len(planes) == 3 else "grey16"
    make_folder(path.parent)
    remove_part_files(path)
    with atomic_output(path) as part:
        image.copy(interpretation=kind).pngsave(str(part), compression=3)
