"""Reports on one image."""

from __future__ import annotations

from typing import Literal

from lowtide.jobs.engine.report import ItemReport


class ImageReport(ItemReport):
    """Result of one image: that of an item, with the sizes of input and output."""

    noun = "image"

    width: int = 0
    height: int = 0
    out_width: int = 0
    out_height: int = 0

    @property
    def size(self) -> str:
        """Sizes of input and output, for texts."""
        return f"{self.width}×{self.height} → {self.out_width}×{self.out_height}"

    @property
    def megapixels(self) -> float:
        """Millions of pixels of the result."""
        return self.out_width * self.out_height / 1e6

    @property
    def pace(self) -> str:
        """Speed of the run, for texts."""
        return f"{self.megapixels / max(self.seconds, 1e-9):.1f} megapixels a second"

    def details(self) -> list[tuple[str, str]]:
        """Return what a kind of job says of an image besides its plan, as (name, text)."""
        return []


class NoisyImageReport(ImageReport):
    """Result of one image, with its noise level where noise was removed.

    ``sigma`` is the standard deviation of the noise in levels of 255, and None where the image does
    not tell it; ``sigma_source`` says whether it was given, estimated from the image, or is that of
    a table at mid-gray. ``noise`` says which noise that is, and ``noise_parameters`` are those
    besides the level. ``shared_by_neighbors`` is whether the estimate found noise that neighboring
    pixels share, as after demosaicing, resizing or JPEG.
    """

    sigma: float | None = None
    sigma_source: Literal["given", "estimated", "table"] = "estimated"
    noise: str = "gaussian"
    noise_parameters: tuple[float, ...] = ()
    shared_by_neighbors: bool = False

    def details(self) -> list[tuple[str, str]]:
        """Return the noise level."""
        if self.sigma is None:
            return []
        text = f"sigma {self.sigma:.1f} of 255, {self.sigma_source}"
        if self.shared_by_neighbors:
            text += "; neighbors share it, as after demosaicing, resizing or JPEG"
        if self.noise != "gaussian":
            text = f"sigma {self.sigma:.1f} of 255 at mid-gray, {self.noise}"
        return [("noise", text)]
