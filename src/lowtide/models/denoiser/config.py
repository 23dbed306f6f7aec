"""Configurations of the denoisers, without PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from lowtide.core.errors import ModelError
from lowtide.models.descriptor import SizeRule
from lowtide.models.families import FileConfig

AttentionName = Literal["linear", "channel", "transposed", "sdpa", "flash", "window", "none"]
Prediction = Literal["v", "epsilon", "sample"]
SchedulerName = Literal["ddim", "ddpm", "dpmsolver++", "unipc", "flow"]
TIMES = 1000  # of a noise schedule
# Values of noisy images, which noise takes beyond 0..1; farther ones no network was trained with.
NOISY_RANGE = -1.0, 2.0

# Brightness and color, each in octaves of 1, 2 and 4 pixels.
LEVELS = 6


@dataclass(frozen=True)
class SlimUNetConfig(FileConfig):
    """Channels, widths, attention and noise of a `SlimUNet`.

    ``features`` channels at the top level, times each of ``multipliers`` from there down, with
    ``blocks`` residual blocks per level on either side. Norms have ``groups`` groups, and the noise
    level is embedded in ``embedding`` values. ``attention`` runs at ``attention_levels``, counted
    from the top at 0; the negative ones count from the lowest level up, at -1.

    ``prediction`` is what the network returns, in the terms of diffusers. ``noise_parameters`` is
    how many values besides the level describe the noise. Levels in training reached ``max_sigma``,
    a standard deviation of values in 0..1. ``scheduler`` is that of several steps unless another
    one is asked for.

    ``noise_model`` is the name of the noise in training. Where that was a camera's, ``camera`` is
    its name and ``noise_sha256`` the hash of its `NoiseTable`. ``linear`` says that values are in
    proportion to light, and ``cfa`` is the pattern of a color filter mosaic by rows, such as RGGB,
    of which the one channel's first pixel is the first.

    Raises ModelError for values that make no network.
    """

    channels: int = 3  # pyright: ignore[reportIncompatibleMethodOverride]
    features: int = 32
    multipliers: tuple[int, ...] = (1, 2, 4)
    blocks: int = 1
    groups: int = 8
    embedding: int = 128
    attention: AttentionName = "linear"
    attention_levels: tuple[int, ...] = (-1,)
    prediction: Prediction = "v"
    noise_model: str = "gaussian"
    noise_parameters: int = 0
    max_sigma: float = 60 / 255
    scheduler: SchedulerName = "ddim"
    camera: str = ""
    noise_sha256: str = ""
    linear: bool = False
    cfa: str = ""

    scale = 1

    def __post_init__(self) -> None:
        for name in ("multipliers", "attention_levels"):
            values = getattr(self, name)
            if not isinstance(values, (list, tuple)) or not all(type(one) is int for one in values):
                raise ModelError(f"{name} must be a list of integers, not {values!r}")
            # JSON has no tuples. Bypasses the frozen dataclass.
            object.__setattr__(self, name, tuple(values))
        for name, least in (
            *(("channels", 1), ("features", 1), ("blocks", 1), ("groups", 1)),
            *(("embedding", 4), ("noise_parameters", 0)),
        ):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ModelError(f"{name} must be an integer of at least {least}, not {value!r}")
        if not self.multipliers or min(self.multipliers) < 1:
            raise ModelError(f"multipliers must be at least 1, not {self.multipliers}")
        for name, kinds in (
            *(("attention", AttentionName), ("prediction", Prediction)),
            ("scheduler", SchedulerName),
        ):
            if getattr(self, name) not in get_args(kinds):
                known = ", ".join(get_args(kinds))
                raise ModelError(f"{name} {getattr(self, name)!r} is not one of {known}")
        self._check_noise()
        if wrong := [width for width in self.widths if width % self.groups]:
            raise ModelError(f"{self.groups} groups do not divide {wrong[0]} channels")
        if self.embedding % 2:
            raise ModelError(f"embedding must be even, not {self.embedding}")
        levels = len(self.multipliers)
        if wrong := [level for level in self.attention_levels if not -levels <= level < levels]:
            raise ModelError(f"there is no level {wrong[0]}: the levels are 0 to {levels - 1}")
        if not isinstance(self.max_sigma, (int, float)) or not 0 < self.max_sigma <= 1:
            raise ModelError(f"max_sigma must be above 0 and at most 1, not {self.max_sigma!r}")

    def _check_noise(self) -> None:
        for name in ("noise_model", "camera", "noise_sha256", "cfa"):
            if not isinstance(getattr(self, name), str):
                raise ModelError(f"{name} must be text, not {getattr(self, name)!r}")
        if not isinstance(self.linear, bool):
            raise ModelError(f"linear must be true or false, not {self.linear!r}")
        if self.cfa and (len(self.cfa) != 4 or set(self.cfa) - set("RGB") or self.channels != 1):
            raise ModelError(
                f"cfa {self.cfa!r} with {self.channels} channels: a mosaic has one channel, and its"
                " pattern four of the letters R, G and B"
            )

    @property
    def white_parameters(self) -> tuple[float, ...]:
        """What white noise has as parameters: no share of shot noise, where that is known."""
        return (0.0,) if self.noise_model == "poisson-gaussian" else ()

    @property
    def widths(self) -> tuple[int, ...]:
        """Channels of each level, from the top down."""
        return tuple(self.features * times for times in self.multipliers)

    def attends(self, level: int) -> bool:
        """Return whether ``level``, counted from the top, has attention."""
        levels = len(self.multipliers)
        wanted = {one % levels for one in self.attention_levels}
        return self.attention != "none" and level in wanted

    @property
    def film_channels(self) -> tuple[int, ...]:
        """Channels of each residual block, in the order in which they run."""
        down = [width for width in self.widths for _ in range(self.blocks)]
        return *down, *down[: -self.blocks][::-1]

    @property
    def size(self) -> SizeRule:
        """Sizes that all levels divide, the pixel-unshuffled input included."""
        return SizeRule(multiple_of=2 ** len(self.multipliers))

    @property
    def noise(self) -> str:
        """What noise it removes, and up to which level."""
        camera = f" noise of {self.camera}" if self.camera else ""
        return f"{self.noise_model}{camera}, up to a sigma of {self.max_sigma * 255:.3g} of 255"

    @property
    def tags(self) -> tuple[str, ...]:
        """Size tags in the usual notation, and attention."""
        widths = "-".join(map(str, self.widths))
        attention = "no" if self.attention == "none" else self.attention
        return f"{self.features}nf", widths, f"{attention} attention", self.noise_model

    @property
    def buffer_elements(self) -> int:
        """Number of values that say at which noise level it runs."""
        return 2 * sum(self.film_channels) + 6


@dataclass(frozen=True)
class FiniteDenoiserConfig(FileConfig):
    """Widths and depths of a `FiniteDenoiser`, which is given the noise of pictures by octaves.

    The network works at a half of the picture's size and below: each of ``blocks`` is a level's
    number of blocks on either side, the last that of the lowest level. Levels have ``features``
    channels, doubled from each to the next. At full size it has ``fine`` channels. Levels in
    training reached ``max_sigma``, a standard deviation of values in 0..1.

    Raises ModelError for values that make no network.
    """

    features: int = 48
    blocks: tuple[int, ...] = (3, 3, 4)
    fine: int = 16
    max_sigma: float = 55 / 255

    scale = 1
    # Facts that a `SlimUNetConfig` has as fields.
    noise_model: ClassVar[str] = "gaussian"
    noise_parameters: ClassVar[int] = LEVELS
    white_parameters: ClassVar[tuple[float, ...]] = (1.0,) * LEVELS
    scheduler: ClassVar[SchedulerName] = "ddim"
    linear: ClassVar[bool] = False
    camera: ClassVar[str] = ""
    noise_sha256: ClassVar[str] = ""
    cfa: ClassVar[str] = ""

    def __post_init__(self) -> None:
        if not isinstance(self.blocks, list | tuple):
            raise ModelError(f"blocks must be a list of integers, not {self.blocks!r}")
        # JSON has no tuples. Bypasses the frozen dataclass.
        object.__setattr__(self, "blocks", tuple(self.blocks))
        values = (self.features, self.fine, *self.blocks)
        if not self.blocks or not all(type(value) is int and value >= 1 for value in values):
            raise ModelError(f"a FiniteDenoiser needs integers of at least 1, not {self.to_dict()}")
        if not isinstance(self.max_sigma, int | float) or not 0 < self.max_sigma <= 1:
            raise ModelError(f"max_sigma must be above 0 and at most 1, not {self.max_sigma!r}")

    @property
    def widths(self) -> tuple[int, ...]:
        """Channels of each level, from the top down."""
        return tuple(self.features << level for level in range(len(self.blocks)))

    @property
    def size(self) -> SizeRule:
        """Sizes that all levels divide."""
        return SizeRule(multiple_of=2 ** len(self.blocks))

    @property
    def noise(self) -> str:
        """What noise it removes, and up to which level."""
        most = f"{self.max_sigma * 255:.3g}"
        return f"white or shared by neighbors, up to a sigma of {most} of 255"

    @property
    def tags(self) -> tuple[str, ...]:
        """Size tags in the usual notation."""
        return f"{self.features}nf", "-".join(map(str, self.blocks)), "finite reach"

    @property
    def buffer_elements(self) -> int:
        """Number of values that say at which noise level it runs."""
        return LEVELS + 1


DenoiserConfig = SlimUNetConfig | FiniteDenoiserConfig
