"""Configuration of ParagonConv, without PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, Self, cast

from lowtide.core.errors import ModelError
from lowtide.models.descriptor import SizeRule

SCALES = (1, 2, 3, 4, 8)


class FileConfig:
    """Base of the dataclasses that a model file holds as JSON, whole.

    Networks have three channels, take any size and remove no noise unless a class says otherwise.
    """

    @property
    def channels(self) -> int:
        """Channels of input and result."""
        return 3

    @property
    def size(self) -> SizeRule:
        """Sizes the network accepts."""
        return SizeRule()

    @property
    def noise(self) -> str | None:
        """What noise the network removes, for a denoiser."""
        return None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`; raises ModelError with missing or unknown entries.

        Files are older than some fields: what has a default may be missing.
        """
        known = fields(cast(Any, cls))
        needed = {field.name for field in known if field.default is MISSING}
        if wrong := needed - set(values) | set(values) - {field.name for field in known}:
            names = ", ".join(sorted(wrong))
            raise ModelError(f"the configuration has missing or unknown entries: {names}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, ready for JSON."""
        return asdict(cast(Any, self))


@dataclass(frozen=True)
class ParagonConvConfig(FileConfig):
    """Scale, channels and depth of a `ParagonConv`.

    ``features`` are the channels and ``blocks`` the convolutions of its trunk. Raises ModelError
    for a scale that is not in `SCALES` or a size below 1.
    """

    scale: int
    features: int
    blocks: int

    def __post_init__(self) -> None:
        values = (self.scale, self.features, self.blocks)
        if not all(type(value) is int and value >= 1 for value in values):
            raise ModelError(f"ParagonConv needs integers of at least 1, not {asdict(self)}")
        if self.scale not in SCALES:
            raise ModelError(
                f"ParagonConv upscales by {', '.join(map(str, SCALES))}, not by {self.scale}"
            )

    @property
    def tags(self) -> tuple[str, ...]:
        """Size tags in the usual notation, such as ``64nf`` and ``8nb``."""
        return f"{self.features}nf", f"{self.blocks}nb"

    @property
    def receptive_field(self) -> int:
        """Radius of the receptive field, in input pixels to each side.

        One per 3×3 convolution: first, blocks, last. The cubic path has a radius of 2, so it never
        counts.
        """
        return self.blocks + 2

    @property
    def parameters(self) -> int:
        """Number of learned values."""
        per_output = 9 * self.features + 1
        outputs = self.blocks * self.features + 3 * self.scale**2
        return self.features * (9 * 3 + 1) + outputs * per_output

    @property
    def buffer_elements(self) -> int:
        """Number of values of the fixed path: one dense 5×5 kernel from 3 channels."""
        return 3 * self.scale**2 * 3 * 25
