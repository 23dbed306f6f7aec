"""Scores of denoised files against clean ones: PSNR and SSIM, raw and brightness-aligned."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from pydantic import BaseModel

from lowtide.core.errors import ImageError, UsageError
from lowtide.core.input_file import exists, is_folder, require_input
from lowtide.core.metrics import SSIM_WINDOW, ssim
from lowtide.jobs.images.adapter import NoisyImageAdapter
from lowtide.jobs.images.value_range import shared_range
from lowtide.media import inspect_image, open_image
from lowtide.media.discover import FilePair

_BAND_PIXELS = 1 << 17


class PixelScores(BaseModel):
    """PSNR and SSIM of all color samples in 0..1.

    ``psnr_db`` is None where there is no difference, ``ssim`` for images smaller than its window.
    """

    psnr_db: float | None
    ssim: float | None


class ReferenceScores(BaseModel):
    """Scores of one image: as it is, and brightness-aligned.

    Aligned is the image times ``gain``, the least-squares fit to the reference.
    """

    raw: PixelScores
    aligned: PixelScores
    gain: float


class DenoiseScores(BaseModel):
    """Scores of a noisy file and of its result against a clean file, ``reference``."""

    reference: str
    noisy: ReferenceScores
    result: ReferenceScores

    def details(self) -> list[tuple[str, str]]:
        """Return raw and aligned scores, noisy and denoised, as (name, text)."""
        before, after = self.noisy, self.result
        gains = f"gains {before.gain:.4f} and {after.gain:.4f}"
        return [
            ("scores", f"{_change(before.raw, after.raw)}, raw, against {self.reference}"),
            ("", f"{_change(before.aligned, after.aligned)}, brightness-aligned ({gains})"),
        ]


def find_references(pairs: list[FilePair], reference: Path, max_pixels: int) -> dict[str, Path]:
    """Return the clean file of each input: ``reference`` itself, or the same name in that folder.

    Raises:
        UsageError: It is a file and there are several inputs, or one is missing or an output.
        ImageError: One cannot be read, or has another size or number of color channels.
    """
    if not is_folder(reference) and len(pairs) > 1:
        raise UsageError(
            f"--reference {reference} is no folder, and there are {len(pairs)} inputs",
            hint="name a folder with a clean file of the same name for each",
        )
    found = {}
    for pair in pairs:
        clean = reference / pair.name if is_folder(reference) else reference
        if not exists(clean):
            raise UsageError(
                f"{clean}: there is no such file to compare {pair.source} with",
                hint="--reference takes a clean file for a file, and a folder with the same"
                " relative names for a folder",
            )
        require_input(clean)
        if clean.resolve() == pair.target.resolve():
            raise UsageError(
                f"{clean}: this output is the reference",
                hint="choose another output name or folder",
            )
        _check_sizes(pair.source, clean, max_pixels)
        found[str(pair.source)] = clean
    return found


def _check_sizes(source: Path, reference: Path, max_pixels: int) -> None:
    clean = inspect_image(reference, max_pixels=max_pixels).info
    try:
        noisy = inspect_image(source, max_pixels=max_pixels).info
    except ImageError:
        return  # the run reports it
    sizes = [(one.width, one.height, one.color_channels) for one in (noisy, clean)]
    if sizes[0] != sizes[1]:
        first, second = (f"{w}×{h} with {c} color channels" for w, h, c in sizes)
        raise ImageError(
            f"{reference}: a reference of {second}, and {source} is {first}",
            hint="name the clean image of the same size",
        )


def score_files(
    noisy: Path, result: Path, reference: Path, max_pixels: int, scratch: Path | None = None
) -> DenoiseScores:
    """Return the scores of two files against a clean one of the same size.

    Files are read by bands of rows, twice each.

    Raises:
        ImageError: A file cannot be read.
    """
    before, after = (
        _score(PairedRowBands(one, reference, max_pixels, scratch)) for one in (noisy, result)
    )
    return DenoiseScores(reference=str(reference), noisy=before, result=after)


class PairedRowBands:
    """Bands of rows of two files, as color (N, W, C) in 0..1, float64; may be read again."""

    def __init__(
        self, first: Path, second: Path, max_pixels: int, scratch: Path | None = None
    ) -> None:
        self._paths, self._max_pixels, self._scratch = (first, second), max_pixels, scratch

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        limit, scratch, clean = self._max_pixels, self._scratch, self._paths[1]
        first, second = (
            open_image(
                path,
                max_pixels=limit,
                scratch_dir=scratch,
                value_range=shared_range(path, clean, limit, scratch),
            )
            for path in self._paths
        )
        with first, second:
            adapters = [NoisyImageAdapter(one.info, 3) for one in (first, second)]
            height, width, _ = first.shape
            step = max(1, _BAND_PIXELS // width)
            for top in range(0, height, step):
                bottom = min(top + step, height)
                one, other = (
                    adapter.color(source.read(top, bottom)).astype(np.float64)
                    for adapter, source in zip(adapters, (first, second), strict=True)
                )
                yield one, other


def _score(bands: PairedRowBands) -> ReferenceScores:
    products = np.zeros(2)
    for image, clean in bands:
        products += np.vdot(image, clean), np.vdot(image, image)
    gain = float(products[0] / products[1]) if products[1] else 1.0
    raw, aligned = _Means(), _Means()
    for image, clean in bands:
        raw.add(image, clean)
        aligned.add(gain * image, clean)
    return ReferenceScores(raw=raw.scores(), aligned=aligned.scores(), gain=gain)


class _Means:
    """Running means of squared error and SSIM over bands of an image, from the top down."""

    def __init__(self) -> None:
        self._error = self._ssim = 0.0
        self._samples = self._window_rows = 0
        self._last: tuple[np.ndarray, ...] = ()

    def add(self, image: np.ndarray, clean: np.ndarray) -> None:
        """Add the next rows (N, W, C) of both."""
        self._error += float(np.square(image - clean).sum())
        self._samples += image.size
        # Windows that began in the rows before.
        if self._last:
            image, clean = (
                np.concatenate(both) for both in zip(self._last, (image, clean), strict=True)
            )
        self._last = image[1 - SSIM_WINDOW :], clean[1 - SSIM_WINDOW :]
        rows = len(image) + 1 - SSIM_WINDOW
        if rows > 0 and image.shape[1] >= SSIM_WINDOW:
            self._ssim += rows * ssim(image, clean)
            self._window_rows += rows

    def scores(self) -> PixelScores:
        error = self._error / self._samples
        return PixelScores(
            psnr_db=-10 * math.log10(error) if error else None,
            ssim=self._ssim / self._window_rows if self._window_rows else None,
        )


def _change(before: PixelScores, after: PixelScores) -> str:
    text = f"PSNR {decibels_text(before.psnr_db)} → {decibels_text(after.psnr_db)}"
    if before.ssim is None or after.ssim is None:
        return f"{text}, too small for SSIM"
    return f"{text}, SSIM {before.ssim:.4f} → {after.ssim:.4f}"


def decibels_text(psnr_db: float | None) -> str:
    """Return a PSNR as text; None is no difference."""
    return "no difference" if psnr_db is None else f"{psnr_db:.2f} dB"
