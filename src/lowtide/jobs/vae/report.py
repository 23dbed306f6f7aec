"""Report of a video autoencoder's job as plain data."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from lowtide.core.schema import SCHEMA_VERSION
from lowtide.jobs.engine.report import MemoryReport
from lowtide.jobs.vae.settings import VaePrecision


class VaeReport(BaseModel):
    """What was encoded or decoded, how, and how long each phase took.

    ``latents`` are the shape (channels, number, height, width). ``seconds`` are by phase: read,
    encode, decode, compare, write. ``plans`` say by part how it runs in the budget; ``memory`` is
    that of the part that takes most, with all that is held at the same time. ``events`` say what
    went another way than planned. ``psnr_db`` (None: no difference) and ``ssim`` compare the frames
    of a round trip with those that went in, in 0..1: the mean over all frames, and
    ``worst_psnr_db`` the worst frame's.
    """

    schema_version: int = SCHEMA_VERSION
    operation: Literal["encode", "decode", "roundtrip"]
    status: Literal["planned", "done"]
    model: str
    input: str
    output: str | None
    frames: int
    width: int
    height: int
    latents: tuple[int, int, int, int]
    budget_bytes: int
    device: str
    precision: VaePrecision
    posterior: Literal["mean", "sample"] | None = None
    seed: int | None = None
    scaling: dict[str, Any] = {}
    plans: dict[str, str] = {}
    memory: MemoryReport | None = None
    seconds: dict[str, float] = {}
    psnr_db: float | None = None
    worst_psnr_db: float | None = None
    ssim: float | None = None
    notes: list[str] = []
    events: list[str] = []

    @property
    def fps(self) -> float | None:
        """Frames a second, of all phases together; None of a plan."""
        taken = sum(self.seconds.values())
        return self.frames / taken if taken else None
