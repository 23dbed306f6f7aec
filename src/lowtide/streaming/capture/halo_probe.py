"""Measurement of a module's halo (receptive field in rows) on small images."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from lowtide.core.errors import ModelError
from lowtide.memory.measurement.live_peak import live_peak_bytes
from lowtide.streaming.capture.autocast_state import AutocastState
from lowtide.streaming.capture.capture_errors import first_line
from lowtide.streaming.capture.opaque_module import OpaqueModule
from lowtide.streaming.spans import Span
from lowtide.streaming.tolerance import tolerance

# Sides of trial images, tried until the receptive field ends within one; the remainder of the real
# sides is added.
_SIDES, _REST = (64, 128, 256), 64
_GRAINS = (1, 2, 4, 8, 16, 32, 64)
# Values that replace a row to see what depends on it; large ones cross thresholds too.
_REPLACEMENTS = (float("nan"), 3e4, -3e4, 0.5)


def probe_halo(name: str, module: nn.Module, example: Tensor) -> OpaqueModule:
    """Measure the halo, scale and grain of a module that cannot be captured.

    Single rows of small random images are replaced by NaN and large values, to see which rows of
    the result change. Then bands are compared with the whole result.

    Args:
        name: Path of the module, for messages.
        module: Module that takes one image.
        example: Input in the model, (B, C, H, W): trial images have its channels, dtype, device,
        and
            the remainder of its sides by 64.

    Raises:
        ModelError: Rows of the result depend on rows far away, or the module draws random numbers,
            cannot run on small images, or has no fixed scale.
    """
    trial = _Trial(name, module, example)
    upscale, downscale = trial.scale()
    halo = trial.halo(upscale, downscale)
    for grain in (grain for grain in _GRAINS if grain % downscale == 0):
        block = OpaqueModule(
            name,
            module,
            trial.channels,
            upscale,
            downscale,
            halo,
            grain,
            trial.workspace_per_element,
            AutocastState.current(example.device.type),
        )
        if trial.bands_match(block):
            return block
    raise ModelError(f"{name} computes other rows in bands than on the whole image")


class _Trial:
    """Trial runs of one module on small images."""

    def __init__(self, name: str, module: nn.Module, example: Tensor) -> None:
        self._name, self._module, self._example = name, module, example
        image = self._image(_SIDES[0])
        self.channels = self._run(image).shape[1]
        self.workspace_per_element = 0.0
        if example.device.type == "cpu":
            self.workspace_per_element = live_peak_bytes(lambda: self._run(image)) / image.numel()

    def _image(self, height: int) -> Tensor:
        generator = torch.Generator().manual_seed(height)
        shape = self._example.shape
        sides = height + shape[2] % _REST, _SIDES[0] + shape[3] % _REST
        image = torch.rand(1, shape[1], *sides, generator=generator)
        return image.to(self._example.device, self._example.dtype)

    @torch.inference_mode()
    def _run(self, image: Tensor) -> Tensor:
        try:
            result = self._module(image.clone())
        except Exception as error:
            sides = "×".join(map(str, reversed(image.shape[2:])))
            reason = first_line(error)
            raise ModelError(f"{self._name} could not be run at {sides}: {reason}") from error
        if not isinstance(result, Tensor) or result.dim() != 4 or len(result) != 1:
            raise ModelError(f"{self._name} does not return an image for an image")
        return result

    def scale(self) -> tuple[int, int]:
        """Return (result rows per input row, input rows per result row); one of them is 1."""
        upscale, downscale = set[int](), set[int]()
        for height in _SIDES[:2]:
            image = self._image(height)
            result = self._run(image)
            if not torch.equal(result, self._run(image)):
                raise ModelError(f"{self._name} draws random numbers")
            if any(self._run(other).shape != result.shape for other in (-image, 0 * image)):
                raise ModelError(f"the output shape of {self._name} depends on values of the input")
            given, made = image.shape[2:], result.shape[2:]
            if all(side % own == 0 for side, own in zip(made, given, strict=True)):
                upscale.update(side // own for side, own in zip(made, given, strict=True))
                downscale.add(1)
            else:
                upscale.add(1)
                downscale.update(-(-own // side) for side, own in zip(made, given, strict=True))
        if len(upscale) > 1 or len(downscale) > 1:
            raise ModelError(f"{self._name} has no fixed scale between its input and its output")
        (found,), (divided,) = upscale, downscale
        if divided > 1 and self._example.shape[2] % divided:
            raise ModelError(
                f"{self._name} makes one row from {divided}, which does not divide the"
                f" {self._example.shape[2]} rows of its input"
            )
        return found, divided

    def halo(self, upscale: int, downscale: int) -> int:
        """Return the most rows between a result row and an input row that it depends on."""
        for height in _SIDES:
            image = self._image(height)
            size, before = image.shape[2], self._run(image)
            farthest = 0
            for row, odd in itertools.product(_rows_to_replace(size), _REPLACEMENTS):
                changed = image.clone()
                changed[:, :, row] = odd
                differs = (self._run(changed) != before).any(dim=3).any(dim=1)[0].nonzero()
                if len(differs):
                    low, high = (
                        int(end) * downscale // upscale for end in (differs[0], differs[-1])
                    )
                    farthest = max(farthest, row - low, high + downscale - 1 - row)
                if farthest >= size // 3:
                    break
            if farthest < size // 3:
                return farthest
        raise ModelError(f"rows of {self._name} depend on rows far away, or on all of them")

    def bands_match(self, block: OpaqueModule) -> bool:
        """Whether bands equal the whole at both ends and inside, for several heights."""
        image = self._image(_SIDES[1])
        whole = self._run(image)
        types = [image.dtype, *(weight.dtype for weight in self._module.parameters())]
        allowed = tolerance(types) * whole.abs().max().item()
        return all(
            self._max_difference(block, image, whole, span) <= allowed
            for span in _spans(whole.shape[2])
        )

    def _max_difference(
        self, block: OpaqueModule, image: Tensor, whole: Tensor, span: Span
    ) -> float:
        low, high = block.receptive_field(span, image.shape[2])
        rows = self._run(image[:, :, low:high])
        first = span[0] - low * block.upscale // block.downscale
        rows, wanted = rows[:, :, first : first + span[1] - span[0]], whole[:, :, slice(*span)]
        return (rows - wanted).abs().max().item() if rows.shape == wanted.shape else float("inf")


def _rows_to_replace(size: int) -> Iterator[int]:
    """Yield the rows to replace: both ends, and a stretch in the middle.

    Windows may begin anywhere in the stretch.
    """
    yield from (0, 1, size - 2, size - 1)
    yield from range(size // 2 - 8, size // 2 + 8)


def _spans(size: int) -> Iterator[Span]:
    """Yield bands of different positions and heights."""
    yield from ((0, size), (0, size // 3), (size - size // 3, size), (size // 2, size // 2 + 1))
    for first, height in zip(range(3, size // 2, 7), itertools.cycle((5, 8, 13, 16)), strict=False):
        yield first, first + height
