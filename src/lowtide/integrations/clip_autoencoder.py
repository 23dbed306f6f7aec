"""Video autoencoders that encode and decode clips within a budget, chunk by chunk.

They are read from folders of diffusers or of Lowtide, and from SeedVR2's file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide.core.errors import BudgetError, ModelError, UsageError
from lowtide.core.input_file import exists, is_folder, require_input
from lowtide.core.units import format_bytes
from lowtide.integrations.video_autoencoders.clip_part import ClipPartStream
from lowtide.integrations.video_autoencoders.families import (
    VideoAutoencoderFamily,
    class_names,
    family_of,
)
from lowtide.memory.budget import Budget
from lowtide.memory.oom import lacks_memory, naming_out_of_memory
from lowtide.memory.process_memory import failing_beyond_container
from lowtide.memory.profiles import DeviceProfile
from lowtide.memory.tracing.python_places import PythonStatePlaces
from lowtide.models.video_vae.config import CLASS_NAME
from lowtide.models.video_vae.video_vae import CONFIG_NAME, VideoVAE, read_model
from lowtide.streaming.clip_plan import ClipPlan, ReadChunk, RunPart, WriteChunk

PartName = Literal["encoder", "decoder"]
_COLORS = 3
# Side of the trial frames that show how much smaller latents are.
_TRIAL_SIDE = 128
# Entries of configurations that say how a diffusion model scales latents.
_SCALING = ("scaling_factor", "shift_factor", "latents_mean", "latents_std")


@dataclass(frozen=True)
class ClipAutoencoder:
    """A video autoencoder and what is known of its family.

    Latents are as the encoder makes them, never scaled.

    Attributes:
        module: The autoencoder, in evaluation mode.
        family: How its parts run in chunks of frames.
        budget: Memory for a part at work, with the frames that are in flight.
        scratch: Folder for scratch files, or None for the system's.
        profile: GPU to plan for, which need not be here; weights may be on "meta" then.
    """

    module: nn.Module
    family: VideoAutoencoderFamily
    budget: Budget
    scratch: Path | None = None
    profile: DeviceProfile | None = None

    @property
    def kind(self) -> str:
        """Name of its class."""
        return type(self.module).__name__

    @property
    def scaling(self) -> dict[str, Any]:
        """What its configuration says of how a diffusion model scales latents."""
        config: Any = self.module.config
        found = {name: getattr(config, name, None) for name in _SCALING}
        return {name: value for name, value in found.items() if value is not None}

    @cached_property
    def ratios(self) -> tuple[int, int]:
        """Frames of a latent after the first, and pixels along each side of it."""
        part, weight = self.family.encoder(self.module), next(self.module.parameters())
        state: tuple[Tensor, ...] = ()
        frames, latents = 0, torch.empty(0)
        kept, fake = (
            PythonStatePlaces(self.module).kept(),
            FakeTensorMode(allow_non_fake_inputs=True),
        )
        with kept, torch.no_grad(), fake:
            for chunk, count in ((part.first, 1), (part.later, part.frames[1])):
                shape = 1, _COLORS, count, _TRIAL_SIDE, _TRIAL_SIDE
                given = torch.empty(shape, dtype=weight.dtype, device=weight.device)
                latents, *after = chunk(given, *state)
                frames, state = count, tuple(after)
        return frames // latents.shape[2], _TRIAL_SIDE // latents.shape[3]

    @cached_property
    def frame_step(self) -> int:
        """Frames by which the length of a clip grows, beyond its first."""
        part = self.family.encoder(self.module)
        takes_any = not (part.drops_rest or part.refuses_rest)
        return self.ratios[0] if takes_any else part.frames[1]

    @cached_property
    def latent_channels(self) -> int:
        """Channels of a latent."""
        config: Any = self.module.config
        return getattr(config, "latent_channels", None) or config.z_dim

    def padded(self, shape: tuple[int, int, int]) -> tuple[int, int, int]:
        """Return frames, height and width that whole latents have, of a clip's."""
        step, space = self.frame_step, self.ratios[1]
        frames, height, width = shape
        whole = 1 + -(-(frames - 1) // step) * step
        return whole, -(-height // space) * space, -(-width // space) * space

    def made(self, latents: tuple[int, int, int]) -> tuple[int, int, int]:
        """Return frames, height and width that latents make, of their number and sides."""
        time, space = self.ratios
        return 1 + (latents[0] - 1) * time, latents[1] * space, latents[2] * space

    def chunk_frames(self, name: PartName) -> int:
        """Return the most frames of one chunk, that the encoder takes or the decoder makes."""
        first, later = getattr(self.family, name)(self.module).frames
        most = first + later - 1
        return most if name == "encoder" else most * self.ratios[0]

    def plan(
        self, name: PartName, shape: tuple[int, int, int], *, reserved: int = 0
    ) -> PlannedClipPart:
        """Plan a part for frames or latents of this number, height and width.

        Args:
            name: Which part.
            shape: Of whole latents: see `padded`.
            reserved: Bytes of the budget that others hold while it runs.

        Raises:
            BudgetError: It does not fit; names the least that would do.
        """
        channels = _COLORS if name == "encoder" else self.latent_channels
        weight = next(self.module.parameters())
        # only the shape counts
        like = weight.new_empty(1).expand(1, channels, *shape)
        left = replace(self.budget, device_bytes=self.budget.device_bytes - reserved)
        part = getattr(self.family, name)(self.module)
        stream = part.stream(budget=left, scratch=self.scratch, profile=self.profile)
        try:
            with torch.no_grad():
                return PlannedClipPart(stream, like, stream.chunks.plan(like, keep_result=False))
        except BudgetError as error:
            if error.smallest is None:
                raise
            least = error.smallest + reserved
            raise BudgetError(
                f"the {name} of this {self.kind} and its frames need at least"
                f" {format_bytes(least)}, and the budget is {self.budget}",
                smallest=least,
                hint=self.budget.hint_for(least),
            ) from error


@dataclass(frozen=True)
class PlannedClipPart:
    """A part of a video autoencoder, planned for clips of one shape.

    Attributes:
        stream: The part.
        like: Tensor of the clip's shape, dtype and device, without values.
        plan: How its chunks run.
    """

    stream: ClipPartStream
    like: Tensor
    plan: ClipPlan

    @cached_property
    def run_sizes(self) -> list[tuple[int, int]]:
        """Frames or latents that each run takes, and those that it makes."""
        lengths, found = iter(self.stream.chunks.lengths(self.like)), list[tuple[int, int]]()
        for run in self.plan:
            made = sum(meta.shape[2] for meta in run.results[: run.chunks])
            found.append((sum(islice(lengths, run.chunks)), made))
        return found

    def chunks_before(self, run: int) -> int:
        """Return the number of chunks before this run."""
        return sum(one.chunks for one in islice(self.plan, run))

    @property
    def identity(self) -> str:
        """Text that is the same for plans that make the same bytes."""
        runs = [
            (one.chunks, one.times, one.prepared.program.operators_digest, one.prepared.layout.key)
            for one in self.plan.runs
        ]
        return f"{self.plan.store.placement} {runs}"

    @torch.no_grad()
    def run(self, read: ReadChunk, write: WriteChunk, part: RunPart | None = None) -> None:
        """Run chunk by chunk, from ``read`` to ``write``: see `ChunkStream.run_chunks`.

        ``write`` gets results in fp32, in host memory.
        """

        def read_there(count: int) -> Tensor:
            return read(count).to(self.like.device, self.like.dtype)

        self.stream.chunks.run_chunks(
            self.like, read_there, lambda made: write(made.cpu().float()), part
        )


def plain_call(autoencoder: Any, name: PartName, given: Tensor) -> Tensor:
    """Return what the model's own call makes of a clip, not in bands.

    Of frames (1, 3, T, H, W) mean and log variance (1, 2 C, n, h, w), of latents frames.
    """
    if name == "encoder":
        return autoencoder._encode(given)
    return autoencoder._decode(given, return_dict=False)[0]


def import_autoencoder_libraries(path: Path) -> None:
    """Import what loading the model of ``path`` takes: before a budget is set, and within a limit.

    Raises:
        ModelError: As `load_clip_autoencoder`.
        UsageError: As `load_clip_autoencoder`.
        OutOfMemoryError: A limit on this process leaves too little.
    """
    if _is_file(path):
        return
    name = _class_name(path)
    if name != CLASS_NAME:
        imported = naming_out_of_memory("while diffusers was imported", is_lack=lacks_memory)
        with failing_beyond_container(), imported:
            _diffusers_class(name)


def load_clip_autoencoder(
    path: Path, budget: Budget, *, dtype: torch.dtype = torch.float32, scratch: Path | None = None
) -> ClipAutoencoder:
    """Return the video autoencoder of a folder of diffusers or of Lowtide, or of SeedVR2's file.

    Its weights are of ``dtype``.

    Raises:
        ModelError: There is none, or it is damaged.
        UsageError: It is of a kind that does not run in bands, or diffusers is missing.
    """
    name = CLASS_NAME if _is_file(path) else _class_name(path)
    loaded = naming_out_of_memory(f"while {path} was loaded", is_lack=lacks_memory)
    with failing_beyond_container(), loaded:
        if name == CLASS_NAME:
            module = VideoVAE.load(path).to(dtype)
        else:
            module = _load_diffusers(path, name, dtype)
    module.to(budget.device)
    return ClipAutoencoder(module, _checked_family(module), budget, scratch)


def empty_clip_autoencoder(
    model: str | Path, profile: DeviceProfile, budget: Budget, *, dtype: torch.dtype
) -> ClipAutoencoder:
    """Return a video autoencoder without weights, to plan for a GPU that need not be here.

    Args:
        model: Name of a class, with its default sizes, or a path as of `load_clip_autoencoder`.
        profile: The GPU.
        budget: As of `ClipAutoencoder`.
        dtype: Type that its weights would have.

    Raises:
        ModelError: There is no such model, or it is damaged.
        UsageError: As `load_clip_autoencoder`.
    """
    path = Path(model)
    named = str(model) in class_names()
    name = str(model) if named else CLASS_NAME if _is_file(path) else _class_name(path)
    if name == CLASS_NAME:
        config = None if named else read_model(path)[0]
        with torch.device("meta"):
            module: nn.Module = VideoVAE(config)
    else:
        kind = _diffusers_class(name)
        with torch.device("meta"):
            module = kind() if named else kind.from_config(kind.load_config(path))
    # as of any module: diffusers' own warns of parts in float32, which these have not
    nn.Module.to(module, dtype)
    module.requires_grad_(False).eval()
    return ClipAutoencoder(module, _checked_family(module), budget, profile=profile)


def _checked_family(module: nn.Module) -> VideoAutoencoderFamily:
    family = family_of(type(module))
    assert family is not None
    family.check(module)
    return family


def _is_file(path: Path) -> bool:
    """Return whether a path is a file, not a folder; raises `ModelError` for what is neither."""
    if exists(path) and not is_folder(path):
        require_input(path, ModelError)
        return True
    return False


def _class_name(path: Path) -> str:
    config = path / CONFIG_NAME
    hint = f"name a folder with a {CONFIG_NAME} of {', '.join(class_names())}, or SeedVR2's file"
    if not exists(config):
        raise ModelError(f"{path} is no video autoencoder: there is no {CONFIG_NAME}", hint=hint)
    require_input(config, ModelError)
    try:
        values = json.loads(config.read_text(errors="replace"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{config} is damaged: {error}", hint=hint) from error
    name = values.get("_class_name") if isinstance(values, dict) else None
    if name not in class_names():
        raise UsageError(
            f"{path} is a {name}, which cannot run in bands of a video",
            hint=f"known are {', '.join(class_names())}",
        )
    return name


def _diffusers_class(name: str) -> Any:
    try:
        import diffusers
    except ModuleNotFoundError as error:
        raise UsageError(f"{name} needs diffusers", hint="pip install diffusers") from error
    kind: Any = getattr(diffusers, name, None)
    if kind is None:
        raise UsageError(
            f"this diffusers {diffusers.__version__} has no {name}",
            hint="pip install -U diffusers",
        )
    return kind


def _load_diffusers(path: Path, name: str, dtype: torch.dtype) -> nn.Module:
    kind = _diffusers_class(name)
    try:
        # No pickles, and nothing from the network.
        module = kind.from_pretrained(
            path, local_files_only=True, use_safetensors=True, torch_dtype=dtype
        )
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        raise ModelError(f"the {name} in {path} cannot be read: {error}") from error
    return module.requires_grad_(False).eval()
