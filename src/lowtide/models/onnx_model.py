"""ONNX files as models, run by ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from lowtide.core.errors import ModelError, UsageError
from lowtide.models.descriptor import ModelDescriptor, SizeRule
from lowtide.models.model import Model
from lowtide.models.onnx_facts import OnnxFacts, read
from lowtide.models.onnx_providers import Provider
from lowtide.models.onnx_session import (
    CannotRunError,
    OnnxNetwork,
    OnnxSession,
    load_runtime,
    open_session,
)

# Sides of images by which a file without metadata shows its scale, and of one for others.
_SIDES, _LITTLE = (64, 128), (16,)
# What sides may have to be multiples of, looked for at about so many pixels; the least side is one
# of them too.
_GRIDS = (1, 2, 4, 8, 16, 32, 64)
_TRIED = 48


class OnnxModel(Model):
    """An ONNX file, ready to run: see `Model`. It takes and gives tensors of the CPU, in the types
    it was written in.

    `__call__` gives back what it took. ``plain`` is the same by the CPU where another provider runs
    it, to be compared with.
    """

    module: OnnxNetwork
    plain: OnnxNetwork | None = None

    def __init__(self, module: OnnxNetwork, descriptor: ModelDescriptor) -> None:
        super().__init__(module, descriptor)
        # As the file says: to PyTorch the network has no tensors.
        self.descriptor = descriptor

    @property
    def device(self) -> torch.device:
        """Where it runs: on the CPU."""
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """Type of the images the module takes: fp32 whatever the file has inside."""
        return torch.float32

    def __call__(self, image: Tensor) -> Tensor:
        """See `Model`. Raises `ModelError` where the runtime fails, and `MemoryError`."""
        try:
            return super().__call__(image)
        finally:
            self.module.session.let_go()

    def to(
        self,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        memory_format: torch.memory_format | None = None,
    ) -> Self:
        """The model itself, which is where it can be; an order of memory changes nothing.

        Raises `UsageError` for another device than the CPU, and for another type than fp32.
        """
        if device is not None and str(device).partition(":")[0] != "cpu":
            raise UsageError(
                f"{self.descriptor.name} is an ONNX file, which Lowtide runs on the CPU only:"
                f" {str(device)!r} has not been verified",
                hint="the device 'cpu', or the PyTorch weights that it was exported from",
            )
        if dtype not in (None, torch.float32):
            self._check_dtype(dtype)
        return self

    def lower(self, dtype: torch.dtype) -> Self:
        """Raises `UsageError`: an ONNX file has the types that it was written in."""
        self._check_dtype(dtype)
        return self

    def _check_dtype(self, dtype: torch.dtype) -> None:
        name = str(dtype).removeprefix("torch.")
        raise UsageError(
            f"{self.descriptor.name} is an ONNX file, which has the types that it was written in:"
            f" it is not run in {name}",
            hint="export the model again: lowtide export onnx MODEL --precision fp16",
        )

    def use(self, provider: Provider) -> Self:
        """Run by ``provider`` from now on.

        Raises `UsageError` where ONNX Runtime has none of that name, and `ModelError` where it
        cannot be set up or refuses the file.
        """
        if provider.name == self.module.session.provider.name:
            return self
        provider.require()
        if provider.engines is not None:
            provider.engines.mkdir(parents=True, exist_ok=True)
        plain = self.module
        try:
            session = plain.session.by(provider)
        except CannotRunError as error:
            raise ModelError(
                f"{plain.session.path} cannot be run by {provider.name}: {error.message}",
                hint="--provider cpu",
            ) from error
        self.module = OnnxNetwork(session, plain.scale, plain.out_channels, plain.low)
        self.plain = plain
        return self

    def another_session(self) -> object:
        """The file opened once more, by whoever wants to know what that takes."""
        session = self.module.session
        return open_session(session.path, torch.get_num_threads(), provider=session.provider)


def load(path: Path, name: str, digest: str) -> OnnxModel:
    """The model in an ONNX file whose SHA-256 is ``digest``.

    Scale and rule for sizes are those of its metadata, where `lowtide export onnx` wrote it, and
    else found by running small images. Raises `ModelError` for damage, for what the runtime does
    not run, and for a graph that does not turn one gray or RGB image of any size into another;
    `UsageError` where onnx or onnxruntime is missing.
    """
    load_runtime()
    facts = read(path)
    try:
        session = OnnxSession(path, facts.ends)
        scale, channels, rule = _behavior(path, facts, session)
    except CannotRunError as error:
        raise ModelError(
            f"{path} cannot be run by ONNX Runtime: {error.message}",
            hint="a newer onnxruntime may do: pip install --upgrade onnxruntime",
        ) from error
    rows, columns = rule.padding(1, 1)
    session.least = 1 + rows, 1 + columns
    network = OnnxNetwork(session, scale, channels, facts.low)
    session.let_go()
    return OnnxModel(network, _described(path, name, digest, facts, (scale, channels), rule))


def _described(
    path: Path, name: str, digest: str, facts: OnnxFacts, makes: tuple[int, int], rule: SizeRule
) -> ModelDescriptor:  # fmt: skip
    return ModelDescriptor(
        name=name,
        architecture=facts.entries.get("architecture", "ONNX"),
        purpose="SR" if makes[0] > 1 else "Restoration",
        scale=makes[0],
        in_channels=facts.ends.channels,
        out_channels=makes[1],
        size=rule,
        supports_half=False,
        supports_bfloat16=False,
        tiling="supported",
        tags=("ONNX", f"opset {facts.opset}", *([facts.low] if facts.low else [])),
        parameters=facts.parameters,
        weight_bytes=facts.weight_bytes,
        sha256=digest,
        license=facts.entries.get("license"),
        path=str(path),
    )


def _behavior(path: Path, facts: OnnxFacts, session: OnnxSession) -> tuple[int, int, SizeRule]:
    """Scale, channels of the result, and rule for sizes: as the file says, and as it does."""
    try:
        said, rule = facts.number("scale"), facts.size
    except ValueError as error:
        raise ModelError(f"the metadata of {path} are damaged: {error}") from error
    given, made = _first_run(session, facts.ends.channels, rule)
    scale = _scale(path, given, made)
    if said not in (None, scale):
        raise ModelError(f"{path} enlarges by {scale}, and its metadata say by {said}")
    return scale, made[1], rule or _found_rule(path, session, facts.ends.channels, scale)


def _first_run(
    session: OnnxSession, channels: int, rule: SizeRule | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of an image that the graph runs, and of what it makes of it."""
    for side in _SIDES if rule is None else _LITTLE:
        rows, columns = (rule or SizeRule()).padding(side, side)
        image = _image(channels, side + rows, side + columns)
        try:
            return tuple(image.shape), session.shape_of(image)
        except CannotRunError:
            if side == _SIDES[-1] or rule is not None:
                raise
    raise AssertionError("the last size returns or raises")


def _scale(path: Path, given: tuple[int, ...], made: tuple[int, ...]) -> int:
    scale = made[2] // given[2] if len(made) == 4 else 0
    if not scale or made != (1, made[1], given[2] * scale, given[3] * scale):
        raise ModelError(
            f"{path} makes {'×'.join(map(str, made))} of {'×'.join(map(str, given))}, which is no"
            " image enlarged by a whole number"
        )
    if made[1] != given[1]:
        raise ModelError(
            f"{path} takes {given[1]} channels and gives {made[1]};"
            " Lowtide runs gray (1) and RGB (3)"
        )
    return scale


def _found_rule(path: Path, session: OnnxSession, channels: int, scale: int) -> SizeRule:
    """The rule of a file that says nothing of it: its grid first, and then its least side."""

    def runs(height: int, width: int) -> bool:
        try:
            made = session.shape_of(_image(channels, height, width))
        except CannotRunError:
            return False
        return made[2:] == (height * scale, width * scale)

    def sides(grid: int) -> tuple[int, int]:
        """Odd multiples, so that they are not on a coarser grid too."""
        times = _TRIED // grid | 1
        return grid * times, grid * (times + 2)

    grid = next((grid for grid in _GRIDS if runs(*sides(grid))), None)
    if grid is None:
        raise ModelError(
            f"{path} runs at {_SIDES[0]}×{_SIDES[0]} or {_SIDES[1]}×{_SIDES[1]} pixels and at none"
            f" of the sizes tried beside, on grids of up to {_GRIDS[-1]}",
            hint="export it for any height and width, with the metadata lowtide.size",
        )
    least = next((side for side in _GRIDS if side >= grid and runs(side, side)), _SIDES[-1])
    return SizeRule(0 if least == grid else least, grid)


def _image(channels: int, height: int, width: int) -> Tensor:
    return torch.full((1, channels, height, width), 0.5)
