"""Comparison of bands with the model's own call, on the first frames of a clip."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from lowtide.core.metrics import SSIM_WINDOW, ssim
from lowtide.core.units import format_bytes
from lowtide.integrations.clip_autoencoder import (
    ClipAutoencoder,
    PartName,
    PlannedClipPart,
    plain_call,
)
from lowtide.jobs.engine.report import reported_db
from lowtide.jobs.vae.frames import images_of, mean_of_bands
from lowtide.jobs.vae.report import PartCheck
from lowtide.memory.tracing.fake import FakeModelConverter
from lowtide.memory.tracing.trace import MemoryTracer
from lowtide.streaming.clip_plan import RunPart

if TYPE_CHECKING:
    from torch import Tensor

# Chunks at the most: each takes as long as in the run, twice.
_MOST_CHUNKS = 8
# Memory of a call in which operators have workspaces, against that of its tensors alone.
_SPREAD = 2


def check_part(
    model: ClipAutoencoder,
    name: PartName,
    part: PlannedClipPart,
    given: Callable[[int], Tensor],
    *,
    free_bytes: int,
    total: int,
    size: tuple[int, int] | None,
) -> PartCheck | str:
    """Compare the first results of a part with those of the model's own call.

    Args:
        model: The model of the part.
        name: Which part.
        part: How it runs.
        given: Returns the first frames or latents, so many.
        free_bytes: What the call may take.
        total: Frames or latents of the clip.
        size: Height and width of frames; None of latents.

    Returns:
        The differences over as many as fit, or why none was compared.
    """
    found, least = 0, 0
    while found < len(part.run_sizes) and part.chunks_before(found + 1) <= _MOST_CHUNKS:
        need = _plain_bytes(model, name, part, _taken(part, found + 1))
        least = least or need
        if need > free_bytes:
            break
        found += 1
    if not found:
        return (
            f"the {name} was not compared: its own call takes {format_bytes(least)} on the first"
            f" chunks, and the budget leaves {format_bytes(free_bytes)}"
        )
    import torch

    taken, made = given(_taken(part, found)), list[torch.Tensor]()
    with torch.no_grad():
        there = taken.to(part.like.device, part.like.dtype)
        plain = plain_call(model.module, name, there).float().cpu()[:, :, :total]
    del there
    chunks = iter(taken.split(1, 2))

    def read(count: int) -> Tensor:
        return torch.cat([next(chunks) for _ in range(count)], 2)

    part.run(read, made.append, RunPart(last=found))
    return _differences(name, torch.cat(made, 2)[:, :, :total], plain, total, size)


def _differences(
    name: PartName, made: Tensor, plain: Tensor, total: int, size: tuple[int, int] | None
) -> PartCheck:
    if size is None:
        most = (made - plain).abs().max()
        return PartCheck(
            part=name,
            compared=made.shape[2],
            total=total,
            max_error=float(most),
            largest=float(plain.abs().max()),
        )
    errors, squares, likeness = list[float](), list[float](), list[float]()
    for one, other in zip(images_of(made, *size), images_of(plain, *size), strict=True):
        apart = np.abs(one - other)
        errors.append(float(apart.max()))
        squares.append(float(np.square(apart, dtype=np.float64).mean()))
        if min(size) >= SSIM_WINDOW:
            likeness.append(mean_of_bands(ssim, one, other, SSIM_WINDOW))
    square = float(np.mean(squares))
    return PartCheck(
        part=name,
        compared=made.shape[2],
        total=total,
        max_error=max(errors),
        largest=1.0,
        psnr_db=None if square == 0 else reported_db(-10 * float(np.log10(square))),
        ssim=round(float(np.mean(likeness)), 6) if likeness else None,
    )


def _taken(part: PlannedClipPart, runs: int) -> int:
    return sum(taken for taken, _ in part.run_sizes[:runs])


def _plain_bytes(model: ClipAutoencoder, name: PartName, part: PlannedClipPart, count: int) -> int:
    """Return about the most bytes of the model's own call on so many frames or latents."""
    import torch

    faker, like = FakeModelConverter(), part.like
    twin, tracer = faker.model(model.module), MemoryTracer(call=faker.calls)
    tracer.label(twin.parameters(), "weights")
    with faker.fake_mode(), torch.no_grad():
        shape = 1, like.shape[1], count, *like.shape[3:]
        given = torch.empty(shape, dtype=like.dtype)  # twins are on the CPU
        with tracer:
            plain_call(twin, name, given)
    trace = tracer.trace
    return _SPREAD * (trace.peak_bytes - trace.initial_bytes)
