"""Reports of denoised NIfTI files."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lowtide.core.errors import InputError
from lowtide.jobs.denoise.report import DenoisedImageReport, DenoiseReport
from lowtide.jobs.denoise.volumes.scores import MaskScores, ResidualStructure


class DenoisedVolumeReport(DenoisedImageReport):
    """Result of one NIfTI file that was denoised; its plan is that of one slice.

    Attributes:
        sigma: Noise level of the median volume in data units, None where no voxel tells it.
        shape: (X, Y, Z, V) of the file.
        method: How its noise is removed, in words.
        levels: Noise level of each volume in data units.
        gradients: Tables that were copied.
        not_finite: Voxels that are NaN or infinite, and kept.
        clipped: Voxels whose result is beyond the sample type.
        residual: Structure of what was removed.
        mask_scores: SNR and CNR in the mask.
    """

    noun = "volume"

    sigma_source: Literal["given", "estimated", "table"] = "estimated"
    shape: tuple[int, int, int, int] = (0, 0, 0, 0)
    method: str = ""
    levels: list[float | None] = Field(default=[])
    gradients: list[str] = Field(default=[])
    not_finite: int = 0
    clipped: int = 0
    residual: ResidualStructure | None = None
    mask_scores: MaskScores | None = None

    @property
    def size(self) -> str:
        """Sizes along all axes, for texts."""
        return " × ".join(map(str, self.shape))

    @property
    def megapixels(self) -> float:
        """Millions of voxels of the result."""
        x, y, z, volumes = self.shape
        return x * y * z * volumes / 1e6

    def details(self) -> list[tuple[str, str]]:
        """Return noise levels, what is done, and what is known of the residual."""
        lines = []
        known = [level for level in self.levels if level is not None]
        if known and self.sigma is not None:
            spread = "" if len(known) == 1 else f", volumes {min(known):.4g} to {max(known):.4g}"
            source = self.noise
            if self.sigma_source != "table":
                kind = "" if self.noise == "gaussian" else f"{self.noise}, "
                source = kind + self.sigma_source
            lines.append(("noise", f"sigma {self.sigma:.4g} in data units, {source}{spread}"))
        if self.method:
            lines.append(("method", self.method))
        if self.strength != 1:
            lines.append(("control", f"strength {self.strength:g}"))
        if (found := self.residual) is not None:
            text = f"std {found.std:.4g}; correlation with the image {found.image_correlation:+.2f}"
            lines.append(("residual", f"{text}, of neighbors {found.neighbor_correlation:+.2f}"))
        if (scores := self.mask_scores) is not None:
            lines.append(("SNR", _change(scores.snr_before, scores.snr_after)))
            lines.append(("CNR", _change(scores.cnr_before, scores.cnr_after)))
        return lines


class VolumeDenoiseReport(DenoiseReport):
    """Report of a denoising job on NIfTI files."""

    item_type = DenoisedVolumeReport
    input_error = InputError

    images: list[DenoisedVolumeReport] = Field(default=[])  # pyright: ignore


def _change(before: float | None, after: float | None) -> str:
    shown = ["no deviation" if one is None else f"{one:.2f}" for one in (before, after)]
    return " → ".join(shown)
