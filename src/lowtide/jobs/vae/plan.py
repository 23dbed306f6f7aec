"""Plan a video autoencoder on a GPU that need not be here: nothing is computed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, Unpack

from pydantic import BaseModel

from lowtide.core.errors import BudgetError, UsageError
from lowtide.core.schema import SCHEMA_VERSION
from lowtide.core.units import format_bytes, format_seconds
from lowtide.jobs.engine.settings import show_keywords
from lowtide.jobs.vae.settings import VaePlanKeywords, VaePlanSettings, VaePrecision
from lowtide.memory.budget import Budget
from lowtide.memory.profiles import DeviceProfile, find_profile

if TYPE_CHECKING:
    from lowtide.integrations.clip_autoencoder import ClipAutoencoder, PartName
    from lowtide.streaming.clip_plan import ChunkProgramRun

_NOTE = "predicted from the GPU's published figures, not verified on one; seconds are a rough prior"


class VaePartPlan(BaseModel):
    """How the encoder or the decoder would run.

    Attributes:
        part: Which one.
        refusal: Why it does not fit, or None.
        smallest_bytes: The least budget that would do, where it does not fit.
        together: Chunks that run together in each band.
        chunks: Chunks of the clip.
        state: Where the state between chunks is, or None where there is none.
        state_bytes: Its bytes.
        peak_bytes: Most bytes of GPU memory, with context and weights.
        host_bytes: Most bytes of the host's memory, for state and maps.
        disk_bytes: Most bytes of scratch files.
        moved_bytes_per_frame: Bytes to host or disk and back, for a frame of the video.
        seconds_per_frame: Estimated seconds for a frame of the video.
        title: The plan in words.
    """

    part: Literal["encoder", "decoder"]
    refusal: str | None = None
    smallest_bytes: int | None = None
    together: int = 0
    chunks: int = 0
    state: Literal["memory", "host", "disk"] | None = None
    state_bytes: int = 0
    peak_bytes: int = 0
    host_bytes: int = 0
    disk_bytes: int = 0
    moved_bytes_per_frame: int = 0
    seconds_per_frame: float = 0.0
    title: str = ""

    def __str__(self) -> str:
        if self.refusal is not None:
            return f"  {self.part:<9} does not fit: {self.refusal}"
        away = {"on the host": self.host_bytes, "on disk": self.disk_bytes}
        elsewhere = "".join(
            f", {format_bytes(size)} {where}" for where, size in away.items() if size
        )
        return (
            f"  {self.part:<9} peak {format_bytes(self.peak_bytes)}{elsewhere};"
            f" {format_bytes(self.moved_bytes_per_frame)} moved and about"
            f" {format_seconds(self.seconds_per_frame)} a frame\n"
            f"  {'':<9} {self.title}"
        )


class VaePlan(BaseModel):
    """Predicted memory and time of a video autoencoder on one GPU, by part.

    Sizes are bytes; ``weight_bytes`` are those of both parts.
    """

    schema_version: int = SCHEMA_VERSION
    model: str
    device: str
    device_title: str
    budget_bytes: int
    precision: VaePrecision
    frames: int
    width: int
    height: int
    latents: tuple[int, int, int, int]
    weight_bytes: int
    context_bytes: int
    parts: list[VaePartPlan]
    notes: list[str] = [_NOTE]

    def require(self) -> None:
        """Raise `BudgetError` that names the least budget for all parts, if one does not fit."""
        refused = [one for one in self.parts if one.refusal is not None]
        if refused:
            worst = max(refused, key=lambda one: one.smallest_bytes or 0)
            raise BudgetError(str(worst.refusal), smallest=worst.smallest_bytes)

    def __str__(self) -> str:
        channels, number, height, width = self.latents
        return "\n".join(
            [
                f"{self.model}, {self.precision}: {self.frames} frames of"
                f" {self.width}×{self.height}, {number} latents of {channels}×{height}×{width}",
                f"  {'device':<9} {self.device_title}, budget {format_bytes(self.budget_bytes)}",
                f"  {'weights':<9} {format_bytes(self.weight_bytes)}, and"
                f" {format_bytes(self.context_bytes)} of the CUDA context",
                *map(str, self.parts),
                *(f"  {'note':<9} {note}" for note in self.notes),
            ]
        )


@show_keywords(VaePlanSettings, VaePlanKeywords)
def plan_vae(
    model: str | Path,
    *,
    device: str | DeviceProfile = VaePlanSettings.device,
    **settings: Unpack[VaePlanKeywords],
) -> VaePlan:
    """Predict what encoding and decoding a clip would take on a GPU; nothing is computed.

    Accuracy class: exact, as the runs that it plans. Neither weights nor a video nor latents are
    needed.

    Args:
        model: Name of a class, such as ``"AutoencoderKLWan"`` or ``"VideoVAE"`` (SeedVR2's), which
            has its full size then; or a folder or file as of `VaeSettings`.
        device: Name of a GPU's profile (``"rtx3060-12gb"``), which need not be present, or a GPU of
            this machine.
        settings: Size and number of the frames, budget, precision and part, as fields of
            `VaePlanSettings`.

    Raises:
        UsageError: An argument is invalid.
        ModelError: There is no such model.
    """
    from lowtide.integrations.clip_autoencoder import empty_clip_autoencoder
    from lowtide.streaming.tiles.tile_step import DTYPES

    chosen = VaePlanSettings.of(model=model, **settings)
    (width, height), frames = chosen.size, chosen.frames
    profile = device if isinstance(device, DeviceProfile) else find_profile(device)
    if profile.kind == "cpu":
        raise UsageError(
            "plans for this machine's CPU measure its kernels, which needs the model",
            hint="lowtide vae decode LATENTS --dry-run, or --device with the name of a GPU",
        )
    precision = _usual_precision(profile) if chosen.precision == "auto" else chosen.precision
    if precision not in profile.supports:
        raise UsageError(f"{profile.title} does not run in {precision}", hint="--precision auto")
    allowed = Budget.for_profile(profile, chosen.budget)
    autoencoder = empty_clip_autoencoder(model, profile, allowed, dtype=DTYPES[precision])
    whole = autoencoder.padded((frames, height, width))
    time_ratio, space = autoencoder.ratios
    latents = 1 + (whole[0] - 1) // time_ratio, whole[1] // space, whole[2] // space
    shapes = {"encoder": whole, "decoder": latents}
    weights = sum(one.numel() * one.element_size() for one in autoencoder.module.parameters())
    held = profile.context_bytes + weights
    wanted: tuple[PartName, ...] = (
        ("encoder", "decoder") if chosen.part == "both" else (chosen.part,)
    )
    return VaePlan(
        model=autoencoder.kind,
        device=profile.name,
        device_title=profile.title,
        budget_bytes=allowed.device_bytes,
        precision=precision,
        frames=frames,
        width=width,
        height=height,
        latents=(autoencoder.latent_channels, *latents),
        weight_bytes=weights,
        context_bytes=profile.context_bytes,
        parts=[_plan_part(autoencoder, one, shapes[one], frames, held) for one in wanted],
    )


def _usual_precision(profile: DeviceProfile) -> VaePrecision:
    return "bf16" if profile.capability >= (8, 0) else "fp16"


def _plan_part(
    autoencoder: ClipAutoencoder,
    name: PartName,
    shape: tuple[int, int, int],
    frames: int,
    held: int,
) -> VaePartPlan:
    """Return the plan of a part with ``held`` bytes held, or why there is none."""
    try:
        plan = autoencoder.plan(name, shape, reserved=held).plan
    except BudgetError as error:
        return VaePartPlan(part=name, refusal=error.message, smallest_bytes=error.smallest)
    profile = autoencoder.profile
    assert profile is not None
    computing = sum(one.times * _seconds(one, profile) for one in plan.runs)
    return VaePartPlan(
        part=name,
        together=plan.runs[-1].chunks,
        chunks=sum(one.times * one.chunks for one in plan.runs),
        state=plan.store.placement if plan.state_bytes else None,
        state_bytes=plan.state_bytes,
        peak_bytes=held + plan.peak_bytes,
        host_bytes=plan.bytes_in("host"),
        disk_bytes=plan.bytes_in("disk"),
        moved_bytes_per_frame=plan.transferred_bytes // frames,
        seconds_per_frame=round((computing + plan.overhead_seconds) / frames, 4),
        title=plan.title,
    )


def _seconds(run: ChunkProgramRun, profile: DeviceProfile) -> float:
    """Return the estimated seconds of a run's operators, by the profile's rates."""
    import torch

    from lowtide.memory.prediction.operator_costs import roofline_seconds
    from lowtide.memory.tracing.fake import FakeModelConverter
    from lowtide.memory.tracing.trace import MemoryTracer

    faker, graph = FakeModelConverter(), run.prepared.program.graph
    module, tracer = faker.model(run.module), MemoryTracer(keep_calls=True, call=faker.calls)
    with faker.fake_mode(), torch.no_grad():
        given = [torch.empty(one.shape, dtype=one.dtype) for one in map(graph.meta, graph.inputs)]
        with tracer:
            module(*given)
    return roofline_seconds(tracer.trace, profile)
