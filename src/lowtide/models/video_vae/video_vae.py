"""Video autoencoder with causal convolutions and norms of single frames, as in SeedVR2.

It is read from a folder as diffusers writes it, or a single .safetensors file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.core.atomic_file import atomic_output
from lowtide.core.errors import ModelError, UsageError
from lowtide.core.input_file import exists, is_folder, require_input
from lowtide.core.philox import philox_generator
from lowtide.models.lowtide_files import (
    ARCHITECTURE,
    CONFIG,
    first_misfit,
    read_metadata,
    read_tensors,
    write_tensors,
)
from lowtide.models.video_vae.config import CLASS_NAME, SPACE, TIME, VideoVAEConfig
from lowtide.models.video_vae.encoder_decoder import VideoVAEDecoder, VideoVAEEncoder

_PURPOSE = 0x766165  # "vae", in the keys of generators
# exp of half of these are deviations from 3e-7 to 2e4, as other implementations clip them.
_LOG_VARIANCES = -30.0, 20.0

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "diffusion_pytorch_model.safetensors"
_HINT = "name a folder that VideoVAE.save wrote, or SeedVR2's ema_vae_fp16.safetensors"


class VideoVAE(nn.Module):
    """Autoencoder of clips: a latent for 8 × 8 pixels of 4 frames, and for those of the first.

        vae = VideoVAE.load("ema_vae_fp16.safetensors")
        latents = vae.encode(clip)                      # (B, 16, n, H / 8, W / 8)
        frames = vae.decode(latents, frames=81, size=(720, 1280))

    A frame depends on those before it and on no later one. So a clip runs slice by slice, of one
    latent or four frames (``use_slicing``), and gives what the whole clip at once gives, to
    rounding. `lowtide.fit`
    makes it run in bands of rows within a budget.

    Weights are random until a state is loaded.

    Args:
        config: Sizes; those of SeedVR2's by default.
    """

    def __init__(self, config: VideoVAEConfig | None = None) -> None:
        super().__init__()
        self.config = config or VideoVAEConfig()
        self.encoder, self.decoder = VideoVAEEncoder(self.config), VideoVAEDecoder(self.config)
        self.use_slicing = True

    @classmethod
    def load(cls, path: str | Path) -> VideoVAE:
        """Return the model in a folder that `save` wrote or in a .safetensors file, in float32.

        A file without a configuration has the names of SeedVR2's ``ema_vae_fp16.safetensors``: its
        sizes are those of its tensors, with 32 groups in norms.

        Raises:
            ModelError: It is no such model, or its tensors do not fit its configuration.
        """
        config, state = read_model(Path(path))
        with torch.device("meta"):
            model = cls(config)
        load_state(model, state, Path(path))
        return model.requires_grad_(False).eval()

    def save(self, path: str | Path) -> None:
        """Write config.json and weights to a folder, or all of it to a .safetensors file."""
        write_model(Path(path), self.config, self.state_dict())

    def encode(self, clip: Tensor, *, sample: bool = False, seed: int = 0) -> Tensor:
        """Return the latents (B, C, n, h, w) of a clip (B, 3, T, H, W), values -1..1.

        Of T = 4n - 3 frames there are n latents. Other clips are filled up by their last frame, and
        sizes that 8 does not divide by the last row and column; `decode` cuts them off again.

        Args:
            clip: Frames.
            sample: Draw latents from their distribution, instead of its mean.
            seed: Of the draw, which is the same for a latent however the clip is sliced.

        Raises:
            UsageError: The clip has another shape, or no floating point.
        """
        self._check(clip, "a clip", 3)
        moments = self._encode(_padded(clip))
        return latents_of(moments, sample=sample, seed=seed)

    def decode(
        self,
        latents: Tensor,
        *,
        frames: int | None = None,
        size: tuple[int, int] | None = None,
    ) -> Tensor:
        """Return the clip (B, 3, T, H, W) of latents (B, C, n, h, w), values about -1..1.

        Args:
            latents: Latents, as `encode` returns them.
            frames: Frames to keep; 4n - 3 by default.
            size: Height and width to keep; 8 h and 8 w by default.

        Raises:
            UsageError: The latents have another shape, or there are fewer frames or pixels.
        """
        self._check(latents, "latents", self.config.latent_channels)
        made = frame_count(latents.shape[2]), *(SPACE * side for side in latents.shape[3:])
        kept = made[0] if frames is None else frames, *(made[1:] if size is None else size)
        if any(not 0 < one <= most for one, most in zip(kept, made, strict=True)):
            raise UsageError(
                f"{latents.shape[2]} latents of {latents.shape[3]}×{latents.shape[4]} make"
                f" {made[0]} frames of {made[1]}×{made[2]}, not {kept[0]} of {kept[1]}×{kept[2]}"
            )
        found = self._decode(latents, return_dict=False)[0]
        return found[:, :, : kept[0], : kept[1], : kept[2]]

    def forward(self, clip: Tensor) -> Tensor:
        """Return a clip (B, 3, T, H, W) encoded and decoded again."""
        height, width = clip.shape[3:]
        return self.decode(self.encode(clip), frames=clip.shape[2], size=(height, width))

    def enable_slicing(self) -> None:
        """Run clips slice by slice, of one latent or four frames, as by default."""
        self.use_slicing = True

    def disable_slicing(self) -> None:
        """Run all frames of a clip at once: a little faster, in more memory."""
        self.use_slicing = False

    def encode_slice(
        self, frames: Tensor, state: Sequence[Tensor] | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Return mean and log variance (B, 2 C, n, h, w) of a slice of frames, and the state after.

        Args:
            frames: A slice (B, 3, T, H, W), 4n - 3 frames of the first one or 4n of a later one,
                with sides of multiples of 8.
            state: What the slice before left; None for the first one.
        """
        return self.encoder.run_slice(frames, state)

    def decode_slice(
        self, latents: Tensor, state: Sequence[Tensor] | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the frames (B, 3, T, H, W) of a slice of n latents, and the state after.

        Args:
            latents: A slice (B, C, n, h, w); 4n - 3 frames of the first one or 4n of a later one.
            state: What the slice before left; None for the first one.
        """
        return self.decoder.run_slice(latents, state)

    def _encode(self, x: Tensor) -> Tensor:
        if not self.use_slicing:
            return self.encode_slice(x)[0]
        later = x[:, :, 1:].split(TIME, 2) if x.shape[2] > 1 else ()
        return _run_slices(self.encode_slice, (x[:, :, :1], *later))

    def _decode(self, z: Tensor, return_dict: bool = False) -> tuple[Tensor]:
        assert not return_dict
        if not self.use_slicing:
            return (self.decode_slice(z)[0],)
        return (_run_slices(self.decode_slice, z.split(1, 2)),)

    def _check(self, given: Tensor, name: str, channels: int) -> None:
        """Raise `UsageError` for what is not (B, ``channels``, T, H, W) of floating point."""
        shape = "×".join(map(str, given.shape))
        if given.dim() != 5 or 0 in given.shape or given.shape[1] != channels:
            wanted = f"(batch, {channels}, frames, height, width)"
            raise UsageError(f"{name} of this model: the shape is {wanted}, not {shape}")
        if not given.is_floating_point():
            raise UsageError(f"{name} of this model: floating point, not {given.dtype}")


def latent_count(frames: int) -> int:
    """Return the number of latents of a clip of so many frames."""
    return -(-(frames - 1) // TIME) + 1


def frame_count(latents: int) -> int:
    """Return the number of frames that latents make."""
    return TIME * (latents - 1) + 1


def _run_slices(
    run: Callable[[Tensor, list[Tensor] | None], tuple[Tensor, list[Tensor]]],
    slices: Sequence[Tensor],
) -> Tensor:
    """Return the joined results of slices of a clip."""
    found: list[Tensor] = []
    state: list[Tensor] | None = None
    for part in slices:
        made, state = run(part, state)
        found.append(made)
    return torch.cat(found, 2)


def _padded(clip: Tensor) -> Tensor:
    """Repeat the last frame, row and column until latents are whole."""
    frames = frame_count(latent_count(clip.shape[2])) - clip.shape[2]
    below, right = (-side % SPACE for side in clip.shape[3:])
    if not frames and not below and not right:
        return clip
    return F.pad(clip, (0, right, 0, below, 0, frames), "replicate")


def latents_of(moments: Tensor, *, sample: bool, seed: int) -> Tensor:
    """Return the mean of latents, or a draw that is the same for a latent however a clip is cut.

    Args:
        moments: Mean and log variance, (B, 2 C, n, h, w).
        sample: Draw, instead of the mean.
        seed: Of the draw.
    """
    mean, log_variance = moments.chunk(2, 1)
    if not sample:
        return mean
    deviation = log_variance.clamp(*_LOG_VARIANCES).mul(0.5).exp()
    return mean + deviation * _noise(seed, mean)


def _noise(seed: int, like: Tensor) -> Tensor:
    """Return standard normal noise (B, C, n, h, w), drawn for each latent image by itself."""
    batch, channels, count, height, width = like.shape
    drawn = np.empty((batch, count, channels, height, width), np.float32)
    for sample in range(batch):
        for at in range(count):
            random = philox_generator(seed, _PURPOSE, sample, at)
            drawn[sample, at] = random.standard_normal(drawn.shape[2:], np.float32)
    return torch.from_numpy(drawn).transpose(1, 2).to(like)


def write_model(path: Path, config: VideoVAEConfig, state: Mapping[str, Tensor]) -> None:
    """Write weights and configuration to a folder, or to a .safetensors file alone."""
    is_file = path.suffix == ".safetensors"
    described = {ARCHITECTURE: CLASS_NAME, CONFIG: config.to_json()}
    write_tensors(path if is_file else path / WEIGHTS_NAME, state, described)
    if not is_file:
        with atomic_output(path / CONFIG_NAME) as part:
            part.write_text(config.to_json())


def read_model(path: Path) -> tuple[VideoVAEConfig, dict[str, Tensor]]:
    """Read what `write_model` wrote, or a file with the names of SeedVR2's."""
    weights = path / WEIGHTS_NAME if is_folder(path) else path
    for file in (weights, path / CONFIG_NAME)[: 1 + is_folder(path)]:
        if not exists(file):
            raise ModelError(f"{path} is no {CLASS_NAME}: there is no {file.name}", hint=_HINT)
        require_input(file, ModelError)
    if weights.suffix != ".safetensors":
        raise ModelError(f"{weights} is no .safetensors file", hint=_HINT)
    state = read_tensors(weights)
    if is_folder(path):
        sizes = path / CONFIG_NAME
        return VideoVAEConfig.parse(sizes, sizes.read_text(errors="replace")), state
    if (text := read_metadata(weights).get(CONFIG)) is not None:
        return VideoVAEConfig.parse(path, text), state
    return _sizes(path, state), state


def load_state(model: nn.Module, state: Mapping[str, Tensor], path: Path) -> None:
    """Give a model on the meta device these tensors, as float32.

    Raises `ModelError` where they do not fit.
    """
    if (wrong := first_misfit(model, state)) is not None:
        flat = not any(one.dim() == 5 for one in state.values())
        raise ModelError(
            f"the tensors in {path} do not fit: {wrong}",
            hint="it is of an image model, which knows no frames" if flat else None,
        )
    model.load_state_dict({name: one.float() for name, one in state.items()}, assign=True)


def _sizes(path: Path, state: Mapping[str, Tensor]) -> VideoVAEConfig:
    """Return the sizes that the tensors of a file without a configuration have."""
    if not {"encoder.conv_in.weight", "decoder.conv_in.weight"} <= set(state):
        raise ModelError(f"{path} is no {CLASS_NAME}: its tensors have other names", hint=_HINT)
    names = [f"encoder.down_blocks.{level}.resnets.0.conv1.weight" for level in range(4)]
    layers = {
        int(found[1]) + 1
        for name in state
        if (found := re.match(r"encoder\.down_blocks\.0\.resnets\.(\d+)\.", name))
    }
    if not layers or not set(names) <= set(state):
        raise ModelError(
            f"{path} is no {CLASS_NAME}: levels of its encoder are missing", hint=_HINT
        )
    return VideoVAEConfig.checked(
        path,
        {
            "block_out_channels": [state[name].shape[0] for name in names],
            "latent_channels": state["decoder.conv_in.weight"].shape[1],
            "layers_per_block": max(layers),
        },
    )
