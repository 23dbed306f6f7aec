"""Report of a video autoencoder's job as plain data."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from lowtide.core.errors import VideoError
from lowtide.jobs.engine.report import ItemReport, JobReport
from lowtide.jobs.vae.settings import VaePrecision

Operation = Literal["encode", "decode", "roundtrip"]


class PartCheck(BaseModel):
    """How far the first results of a part are from those of the model's own call.

    ``compared`` of ``total`` are frames, or latents with their variance. ``max_error`` is the
    largest difference, of values up to ``largest``: of frames in 0..1, whose ``psnr_db`` (None: no
    difference) and ``ssim`` (None of frames smaller than its window) are known too.
    """

    part: Literal["encoder", "decoder"]
    compared: int
    total: int
    max_error: float
    largest: float
    psnr_db: float | None = None
    ssim: float | None = None

    def __str__(self) -> str:
        if self.max_error == 0:
            level = "no difference"
        elif self.part == "encoder":
            level = f"largest difference {self.max_error:.2g} of values up to {self.largest:.3g}"
        else:
            level = f"at least {self.psnr_db:.1f} dB, largest {self.max_error * 255:.2g} of 255"
            level += "" if self.ssim is None else f", SSIM {self.ssim:.6f}"
        what = "latents" if self.part == "encoder" else "frames"
        return (
            f"{self.part}: {level}, against the model's own call ({self.compared} of {self.total}"
            f" {what} measured)"
        )


class ClipReport(ItemReport):
    """What was encoded or decoded, how, and how long each phase took.

    ``latents`` are the shape (channels, number, height, width), and ``scaling`` is what a diffusion
    model scales them by. ``plans`` say by part how it runs in the budget; ``memory`` is that of the
    part that takes most, with all that is held at the same time. ``phases`` are seconds: read,
    encode, decode, compare, write. ``frames_resumed`` of the frames, or of those that were encoded,
    come from a run that was stopped. ``psnr_db`` (None: no difference) and ``ssim`` compare the
    frames of a round trip with those that went in, in 0..1: the mean over all frames, and
    ``worst_psnr_db`` the worst frame's. ``checks`` are those of ``verify``, by part.
    """

    noun = "clip"

    operation: Operation = "encode"
    frames: int = 0
    width: int = 0
    height: int = 0
    latents: tuple[int, int, int, int] = (0, 0, 0, 0)
    precision: VaePrecision = "fp32"
    posterior: Literal["mean", "sample"] | None = None
    seed: int | None = None
    scaling: dict[str, Any] = Field(default={})
    plans: dict[str, str] = Field(default={})
    phases: dict[str, float] = Field(default={})
    frames_resumed: int = 0
    psnr_db: float | None = None
    worst_psnr_db: float | None = None
    ssim: float | None = None
    checks: list[PartCheck] = Field(default=[])

    @property
    def size(self) -> str:
        """Sizes of frames and latents, in the order in which they are made, for texts."""
        channels, number, height, width = self.latents
        frames = f"{self.frames} frames of {self.width}×{self.height}"
        latents = f"{number} latents of {channels}×{height}×{width}"
        made = {"encode": (frames, latents), "decode": (latents, frames)}
        return " → ".join(made.get(self.operation, (frames, latents, frames)))

    @property
    def pace(self) -> str:
        """Speed of the run, for texts."""
        made = self.frames - self.frames_resumed
        return f"{made / max(self.seconds, 1e-9):.3g} frames a second" if made else "resumed only"

    def details(self) -> list[tuple[str, str]]:
        """Return how the parts run, what took how long, and what is lost."""
        rows = [("precision", self.precision), *self.plans.items()]
        if self.frames_resumed:
            rows.append(("resumed", f"{self.frames_resumed:,} frames, of a run that was stopped"))
        if self.phases:
            spent = ", ".join(f"{name} {taken:.3g} s" for name, taken in self.phases.items())
            rows.append(("phases", spent))
        if self.operation == "roundtrip" and self.status == "done":
            rows.append(("equality", self._equality))
        rows += [("error", str(one)) for one in self.checks]
        return rows

    @property
    def _equality(self) -> str:
        if self.psnr_db is None:
            return "no difference"
        likeness = "" if self.ssim is None else f", SSIM {self.ssim:.4f}"
        return f"PSNR {self.psnr_db:.2f} dB, worst frame {self.worst_psnr_db:.2f} dB{likeness}"


class VaeReport(JobReport):
    """Report of a job that encodes a video, decodes latents, or does both."""

    item_type = ClipReport
    noun = "clips"
    input_error = VideoError

    clips: list[ClipReport] = Field(default=[])
