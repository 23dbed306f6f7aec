"""Video autoencoders from files, which encode and decode clips within a budget."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide.core.errors import BudgetError, ModelError, UsageError
from lowtide.core.units import format_bytes
from lowtide.integrations.video_autoencoders.clip_part import ClipPartStream
from lowtide.integrations.video_autoencoders.families import VideoFamily, class_names, family_of
from lowtide.memory.budget import Budget
from lowtide.models.video_vae.video_vae import VideoVAE, latents_of
from lowtide.models.video_vae.video_vae_config import CLASS_NAME
from lowtide.models.video_vae.video_vae_files import CONFIG_NAME
from lowtide.streaming.chunk_stream import AfterChunks

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
        budget: Memory for a part at work, with all frames that it takes or makes.
        scratch: Folder for scratch files, or None for the system's.
    """

    module: nn.Module
    family: VideoFamily
    budget: Budget
    scratch: Path | None = None

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
        with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
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

    @torch.no_grad()
    def encode(
        self,
        clip: Tensor,
        *,
        sample: bool = False,
        seed: int = 0,
        after_chunks: AfterChunks | None = None,
    ) -> Tensor:
        """Return the latents (1, C, n, h, w) of frames (1, 3, T, H, W) in -1..1.

        The last frame, row and column are repeated until latents are whole.

        Args:
            clip: Frames.
            sample: Draw latents from their distribution, instead of its mean.
            seed: Of the draw.
            after_chunks: Called with the number of latents made since the last call.

        Raises:
            BudgetError: The frames and the work on them do not fit; names the least that would do.
        """
        frames, height, width = clip.shape[2:]
        made = self.padded((frames, height, width))
        if made != (frames, height, width):
            more = 0, made[2] - width, 0, made[1] - height, 0, made[0] - frames
            clip = F.pad(clip, more, "replicate")
        moments = self._run("encoder", clip, after_chunks)
        return latents_of(moments, sample=sample, seed=seed)

    @torch.no_grad()
    def decode(self, latents: Tensor, after_chunks: AfterChunks | None = None) -> Tensor:
        """Return the frames (1, 3, T, H, W), about -1..1, of latents (1, C, n, h, w).

        ``after_chunks`` is called with the number of frames made since the last call.

        Raises:
            BudgetError: As `encode`.
        """
        return self._run("decoder", latents, after_chunks)

    def explain(self, name: PartName, shape: tuple[int, int, int]) -> str:
        """Say how a part would run on frames or latents of this number, height and width.

        Raises:
            BudgetError: As `encode`.
        """
        channels = _COLORS if name == "encoder" else self.latent_channels
        weight = next(self.module.parameters())
        # only the shape counts
        like = weight.new_empty(1).expand(1, channels, *shape)
        with self._part(name, like) as part, torch.no_grad():
            return part.chunks.explain(like)

    def _run(self, name: PartName, clip: Tensor, after_chunks: AfterChunks | None) -> Tensor:
        weight = next(self.module.parameters())
        with self._part(name, clip) as part:
            return part(clip.to(weight.device, weight.dtype), after_chunks)

    @contextmanager
    def _part(self, name: PartName, clip: Tensor) -> Iterator[ClipPartStream]:
        """Make a part that works in what the budget leaves beside its input."""
        held = clip.numel() * clip.element_size()
        left = self.budget.device_bytes - held
        if left <= 0:
            raise BudgetError(
                f"the {clip.shape[2]} frames alone take {format_bytes(held)}, more than"
                f" the budget of {self.budget}",
                hint="--frames for a part of the clip, or a larger --budget",
            )
        part = getattr(self.family, name)(self.module)
        try:
            yield part.stream(budget=replace(self.budget, device_bytes=left), scratch=self.scratch)
        except BudgetError as error:
            if error.smallest is None:
                raise
            least = error.smallest + held
            raise BudgetError(
                f"the {name} of this {self.kind} and its frames need at least"
                f" {format_bytes(least)}, and the budget is {self.budget}",
                smallest=least,
                hint=error.hint,
            ) from error


def load_clip_autoencoder(
    path: Path, budget: Budget, *, scratch: Path | None = None
) -> ClipAutoencoder:
    """Return the video autoencoder of a folder of diffusers or of Lowtide, or of SeedVR2's file.

    Raises:
        ModelError: There is none, or it is damaged.
        UsageError: It is of a kind that does not run in bands, or diffusers is missing.
    """
    name = CLASS_NAME if path.is_file() else _class_name(path)
    module = VideoVAE.load(path) if name == CLASS_NAME else _load_diffusers(path, name)
    module.to(budget.device)
    family = family_of(type(module))
    assert family is not None
    family.check(module)
    return ClipAutoencoder(module, family, budget, scratch)


def _class_name(path: Path) -> str:
    config = path / CONFIG_NAME
    hint = f"name a folder with a {CONFIG_NAME} of {', '.join(class_names())}, or SeedVR2's file"
    if not config.is_file():
        raise ModelError(f"{path} is no video autoencoder: there is no {CONFIG_NAME}", hint=hint)
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


def _load_diffusers(path: Path, name: str) -> nn.Module:
    try:
        import diffusers
    except ImportError as error:
        raise UsageError(f"{name} needs diffusers", hint="pip install diffusers") from error
    kind: Any = getattr(diffusers, name, None)
    if kind is None:
        raise UsageError(
            f"this diffusers {diffusers.__version__} has no {name}",
            hint="pip install -U diffusers",
        )
    try:
        # No pickles, and nothing from the network.
        module = kind.from_pretrained(path, local_files_only=True, use_safetensors=True)
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        raise ModelError(f"the {name} in {path} cannot be read: {error}") from error
    return module.float().requires_grad_(False).eval()
