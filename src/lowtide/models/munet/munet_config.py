"""Configuration of MUNet, without PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lowtide.core.errors import ModelError


@dataclass(frozen=True)
class MUNetConfig:
    """Channels, depth and attention of a `lowtide.models.munet.network.MUNet`.

    ``features`` is the number of channels at full size, ``widths`` the multiples of it after each
    halving. ``slope`` is that of the leaky ReLUs, ``window`` and ``shared`` are pixels of the
    attention at the smallest size. Raises ModelError for values that make no network.
    """

    features: int = 64
    widths: tuple[int, ...] = (1, 2, 4, 8)
    slope: float = 0.2
    attention: bool = True
    window: int = 32
    shared: int = 8

    def __post_init__(self) -> None:
        if type(self.features) is not int or self.features < 8:
            raise ModelError(
                f"MUNet's features must be an integer of at least 8, not {self.features}"
            )
        whole = all(type(width) is int and width >= 1 for width in self.widths)
        if not self.widths or not whole:
            raise ModelError(f"MUNet's widths must be integers of at least 1, not {self.widths}")
        if not 0 <= self.slope < 1:
            raise ModelError(f"MUNet's slope must be at least 0 and below 1, not {self.slope}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> MUNetConfig:
        """Build from plain values; raises ModelError with the names of unknown entries."""
        unknown = set(values) - set(cls.__dataclass_fields__)
        if unknown:
            raise ModelError(
                f"MUNet's configuration has unknown entries: {', '.join(sorted(unknown))}"
            )
        given = dict(values)
        if "widths" in given:
            given["widths"] = tuple(given["widths"])
        return cls(**given)

    @property
    def multiple_of(self) -> int:
        """Multiple that sides are padded to inside, so that the halvings divide them."""
        return 2 ** len(self.widths)
