"""Report of a job that denoises camera RAW files."""

from __future__ import annotations

from lowtide.jobs.denoise.report import DenoisedImageReport, DenoiseReport


class RawImageReport(DenoisedImageReport):
    """Result of one RAW file; ``sigma`` is what the network is given, after its transform.

    Attributes:
        colors: Letters of the filter array's places, row by row.
        iso: ISO of the file.
        black: Mean black level, in levels of the file, and ``white`` the white level.
        shot_noise: Variance per level above black, in levels; None where no noise was found.
        read_noise: Standard deviation at black, in levels.
        shot_noise_error, read_noise_error: Their standard errors, texture included, where they were
            estimated.
        written: linear, developed or mosaic.
    """

    colors: str = ""
    iso: int | None = None
    black: float = 0.0
    white: float = 0.0
    shot_noise: float | None = None
    read_noise: float | None = None
    shot_noise_error: float | None = None
    read_noise_error: float | None = None
    written: str = ""

    def details(self) -> list[tuple[str, str]]:
        """Return the sensor, its noise, and what is written."""
        iso = "no ISO" if self.iso is None else f"ISO {self.iso}"
        shown = self.colors if len(self.colors) <= 4 else f"{len(self.colors)} places"
        rows = [("sensor", f"{shown}, black {self.black:g}, white {self.white:g}, {iso}")]
        if self.shot_noise is not None and self.read_noise is not None:
            source = self.noise if self.sigma_source == "table" else self.sigma_source
            shot, read = f"{self.shot_noise:.3g}", f"{self.read_noise:.3g}"
            if self.shot_noise_error is not None and self.read_noise_error is not None:
                shot = f"({shot} ± {self.shot_noise_error:.2g})"
                read = f"({read} ± {self.read_noise_error:.2g})"
            rows.append(("noise", f"variance {shot} × level + {read}², {source}"))
        return [*rows, *self.control(), ("written", self.written)]


class DenoiseRawReport(DenoiseReport):
    """Report of a job that denoises camera RAW files."""

    item_type = RawImageReport
