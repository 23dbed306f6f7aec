"""Registry of the families of models: how their files are recognized, and what trainings build.

A family of Lowtide's is a folder of this package, which says itself what it is. One from outside
is registered by `register_family`, or by its package's entry point in `ENTRY_POINTS`. spandrel's
families are spandrel's. Nothing here imports PyTorch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, cast

from lowtide.core.errors import ModelError, UsageError
from lowtide.models.descriptor import ModelDescriptor, SizeRule, Tiling

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

    from lowtide.models.ncnn_graph import NcnnGraph

    Loader = Callable[[Path, str, str, Mapping[str, Tensor]], tuple[nn.Module, ModelDescriptor]]

ENTRY_POINTS = "lowtide.families"
# The first network of the first family is that of a training which names none.
_FOLDERS = ("paragonsr2", "denoiser", "ldm4ts", "video_vae")
Role = Literal["generators", "discriminators"]

_added: list[ModelFamily] = []


class FileConfig:
    """Base of the dataclasses that a model file holds as JSON, whole.

    Networks have three channels, take any size and remove no noise unless a class says otherwise.
    """

    # Output pixels per input pixel, along each axis.
    scale: int

    @property
    def tags(self) -> tuple[str, ...]:
        """Words about the network's size, for reports."""
        return ()

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

    @property
    def reach(self) -> int | None:
        """Input pixels to each side that a result depends on; None where that is not known."""
        return None

    @property
    def buffer_elements(self) -> int:
        """Number of values that are in the network, but not in its file."""
        return 0

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
class Architecture:
    """Network of a configuration: ``build`` makes it of one, untrained, in fp32 on the CPU.

    ``graph`` makes it for ncnn, of the configuration and a file's tensors, without PyTorch.
    """

    config: type[FileConfig]
    build: Callable[[Any], nn.Module]
    tiling: Tiling
    graph: Callable[[Any, Mapping[str, np.ndarray]], NcnnGraph] | None = None


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """A family of models: how its files are known and built, and its names in trainings.

    Attributes:
        name: Name in messages.
        architectures: What files say in their metadata, ``lowtide.architecture``. They are built
            from ``lowtide.config`` there, and trainings write both.
        recognizes: Whether a file without these is of this family, by the names of its tensors.
        load: Builds such a file's network, in fp32 on the CPU, and its descriptor. It is given the
            path, the model's name, the file's SHA-256 and the tensors, which may have any shape,
            and raises `ModelError` where they do not fit.
        generators: What ``network_g.type`` of `lowtide train sr` may be: builders, which are given
            the scale and the options as keywords, and raise TypeError or `ModelError` for wrong
            ones.
        discriminators: The same of ``network_d.type``; they are given the options alone.
        command: Of a family that maps no image to another: the command that takes its files, which
            have the family's name in their metadata.
    """

    name: str
    architectures: Mapping[str, Architecture] = field(default_factory=dict)
    recognizes: Callable[[Collection[str]], bool] = lambda names: False
    load: Loader | None = None
    generators: Mapping[str, Callable[..., nn.Module]] = field(default_factory=dict)
    discriminators: Mapping[str, Callable[..., nn.Module]] = field(default_factory=dict)
    command: str = ""


def register_family(family: ModelFamily) -> None:
    """Register a family of models for this process: its files load, and trainings know its names.

    Worker processes, and the command line, know those of entry points alone.

    Raises:
        UsageError: Another family has its name, or one of its architectures or networks.
    """
    for known in all_families():
        if known is family:
            return
        taken = _names(known) & _names(family)
        if taken:
            raise UsageError(
                f"the family {family.name} has {sorted(taken)[0]!r}, which is in {known.name} too",
                hint="give it another name",
            )
    _added.append(family)


def all_families() -> Iterator[ModelFamily]:
    """Iterate over Lowtide's families, those that were registered, and those of entry points.

    Raises:
        ModelError: An entry point is damaged.
    """
    for folder in _FOLDERS:
        yield importlib.import_module(f"lowtide.models.{folder}").FAMILY
    yield from _added
    yield from _installed()


def network_builders(role: Role) -> dict[str, Callable[..., nn.Module]]:
    """Return the builders of generators or discriminators by their names in lower case."""
    found = (one for family in all_families() for one in getattr(family, role).items())
    return {name.lower(): build for name, build in found}


def usual_network(role: Role) -> str:
    """Return the name of the network that a training has unless it names another."""
    return next(iter(getattr(next(all_families()), role)))


def architecture_named(name: str) -> Architecture | None:
    """Return the architecture that files call by this name, or None."""
    return next(
        (one.architectures[name] for one in all_families() if name in one.architectures), None
    )


def architecture_of(config: object) -> tuple[str, Architecture] | None:
    """Return the name and architecture of a configuration, or None."""
    known = (one for family in all_families() for one in family.architectures.items())
    return next((one for one in known if one[1].config is type(config)), None)


def family_with_tensors(names: Collection[str]) -> ModelFamily | None:
    """Return the family whose files have tensors of these names, or None."""
    loaded = (one for one in all_families() if one.load is not None)
    return next((one for one in loaded if one.recognizes(names)), None)


def command_for(architecture: str) -> str:
    """Return the command for files of a family that runs no images, or ""."""
    return next((one.command for one in all_families() if one.name == architecture), "")


@cache
def _installed() -> tuple[ModelFamily, ...]:
    found = []
    for point in entry_points(group=ENTRY_POINTS):
        try:
            family = point.load()
        except Exception as error:  # whatever the module of another package raises
            raise ModelError(
                f"the family {point.name} of an installed package cannot be imported: {error}",
                hint=f"repair or remove {point.value.partition(':')[0].partition('.')[0]}",
            ) from error
        if not isinstance(family, ModelFamily):
            raise ModelError(f"{point.value} is no lowtide.models.ModelFamily")
        found.append(family)
    return tuple(found)


def _names(family: ModelFamily) -> set[str]:
    parts = family.architectures, family.generators, family.discriminators
    return {family.name.lower(), *(name.lower() for part in parts for name in part)}
