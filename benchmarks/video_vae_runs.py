"""What ``video_vae.py`` runs in fresh processes: a video autoencoder plain, streamed, in tiles."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from common import in_turns
from streaming_runs import difference
from torch import Tensor

from lowtide.integrations.video_autoencoders.families import family_of
from lowtide.streaming.chunk_stream import ChunkStream
from lowtide.streaming.clip_planner import ChunksTogether

PLAIN, WHOLE = "plain, sliced", "plain, whole clip"
TILES, SEED = "diffusers' tiles", "seed 004's snippet"
# Tiles of this side and stride in pixels.
TILE, STRIDE = 128, 96
# More chunks than any clip here has.
_ALL = 1 << 20


@dataclass(frozen=True)
class Way:
    """How a part runs in bands: chunks together, and where pages and state are."""

    together: ChunksTogether
    pages: Literal["memory", "disk"]


FRAMES_OUTSIDE, BANDS_OUTSIDE, ON_DISK = "frames outside", "bands outside", "caches on disk"
WAYS = {
    FRAMES_OUTSIDE: Way(1, "memory"),
    BANDS_OUTSIDE: Way(_ALL, "memory"),
    ON_DISK: Way(1, "disk"),
}


def wan(width: int) -> Any:
    """A video autoencoder of Wan 2.1 with random weights, ``width`` channels at full size."""
    from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan

    torch.manual_seed(0)
    return AutoencoderKLWan(base_dim=width).eval()


def video_vae(width: int) -> Any:
    """Lowtide's video autoencoder of SeedVR2's shape with random weights."""
    from lowtide.models.video_vae import VideoVAE, VideoVAEConfig

    torch.manual_seed(0)
    widths = width, 2 * width, 4 * width, 4 * width
    return VideoVAE(VideoVAEConfig.of(block_out_channels=widths)).requires_grad_(False).eval()


def magvit(width: int) -> Any:
    """A video autoencoder of EasyAnimate with random weights."""
    from diffusers.models.autoencoders.autoencoder_kl_magvit import AutoencoderKLMagvit

    torch.manual_seed(0)
    return AutoencoderKLMagvit(block_out_channels=[width, 2 * width, 4 * width, 4 * width]).eval()


def cogvideox(width: int) -> Any:
    """A video autoencoder of CogVideoX with random weights."""
    from diffusers.models.autoencoders.autoencoder_kl_cogvideox import AutoencoderKLCogVideoX

    torch.manual_seed(0)
    widths = width, 2 * width, 2 * width, 4 * width
    return AutoencoderKLCogVideoX(block_out_channels=widths).eval()


MODELS: dict[str, Callable[[int], Any]] = {
    "Wan": wan,
    "CogVideoX": cogvideox,
    "SeedVR2-shaped": video_vae,
    "Magvit": magvit,
}


def latents(vae: Any, frames: int, side: int) -> Tensor:
    """Normal latents of a square clip, as many frames as make ``frames``: 4 and 8 × 8 pixels."""
    channels = getattr(vae.config, "latent_channels", None) or vae.config.z_dim
    generator = torch.Generator().manual_seed(1)
    return torch.randn(
        (1, channels, 1 + (frames - 1) // 4, side // 8, side // 8), generator=generator
    )


def decoded(vae: Any, given: Tensor) -> Tensor:
    """The frames of a plain decode."""
    found = vae.decode(given)
    return found if isinstance(found, Tensor) else found.sample


@dataclass(frozen=True)
class Prepared:
    """A decoder as one way runs it, and its stream if it runs in bands."""

    vae: Any
    run: Callable[[Tensor], Tensor]
    stream: ChunkStream | None = None

    def planned(self, given: Tensor) -> dict[str, Any]:
        """What the plan says, if there is one."""
        if self.stream is None:
            return {}
        plan = self.stream.plan(given)
        return {
            "predicted_bytes": plan.peak_bytes,
            "state_bytes": plan.state_bytes,
            "moved_bytes": plan.moved_bytes,
            "plan": plan.title,
        }


_ready: dict[tuple[Any, ...], Prepared] = {}


def prepared(model: str, width: int, way: str, budget: int = 0) -> Prepared:
    """The decoder as one way runs it, within a budget in bytes if in bands."""
    key = model, width, way, budget
    if key not in _ready:
        _ready[key] = _prepare(MODELS[model](width), way, budget)
    return _ready[key]


def _prepare(vae: Any, way: str, budget: int) -> Prepared:
    if way in WAYS:
        family, how = family_of(type(vae)), WAYS[way]
        assert family is not None
        part = family.decoder(vae)
        stream = ChunkStream(
            part.first,
            part.later,
            frames=part.frames,
            budget=budget,
            pages=how.pages,
            together=how.together,
        )
        return Prepared(vae, stream, stream)
    if way == SEED:
        return Prepared(vae, lambda given: decode_by_seed(vae, given))
    if way == TILES:
        vae.enable_tiling(TILE, TILE, STRIDE, STRIDE)
    if way == WHOLE:
        vae.disable_slicing()
    return Prepared(vae, lambda given: decoded(vae, given))


def decode_by_seed(vae: Any, given: Tensor) -> Tensor:
    """Wan's decode with what the seed adds to it: slices, and the oldest moved to the CPU.

    Where there is no GPU nothing moves, and the slices are those of diffusers already.
    """
    slice_size = max(1, 1 // 2)
    vae.clear_cache()
    latent, decoded_slices = vae.post_quant_conv(given), list[Tensor]()
    for first in range(0, latent.shape[2], slice_size):
        vae._conv_idx = [0]
        decoded_slices.append(
            vae.decoder(
                latent[:, :, first : first + slice_size],
                feat_cache=vae._feat_map,
                feat_idx=vae._conv_idx,
                first_chunk=first == 0,
            )
        )
        if (
            len(decoded_slices) > 2
            and torch.cuda.is_available()
            and decoded_slices[0].device.type == "cuda"
        ):
            decoded_slices[0] = decoded_slices[0].cpu()
            torch.cuda.empty_cache()
    output = torch.cat([one.to(given.device, non_blocking=True) for one in decoded_slices], 2)
    vae.clear_cache()
    return output.clamp(-1, 1)


def run_once(
    model: str, width: int, way: str, frames: int, side: int, budget: int
) -> dict[str, Any]:
    """One decode; the plan is made in the first call, which is not measured."""
    torch.set_num_threads(1)
    ready = prepared(model, width, way, budget)
    given = latents(ready.vae, frames, side)
    started = time.process_time()
    with torch.no_grad():
        result = ready.run(given)
    cpu_s = round(time.process_time() - started, 2)
    return {
        "result_bytes": result.nbytes,
        "cpu_s_giving_back": cpu_s,
        **ready.planned(given),
    }


def run_times(
    model: str, width: int, frames: int, side: int, budgets: dict[str, int], pairs: int
) -> dict[str, dict[str, Any]]:
    """Processor seconds of each way, and how far its result is from the plain one."""
    torch.set_num_threads(1)
    figures: dict[str, dict[str, Any]] = {way: {"cpu_s": []} for way in budgets}
    given, whole = latents(prepared(model, width, PLAIN).vae, frames, side), None
    with torch.no_grad():
        for way, budget in budgets.items():
            started = time.process_time()
            result = prepared(model, width, way, budget).run(given)
            figures[way]["first_call_cpu_s"] = round(time.process_time() - started, 2)
            whole = result if whole is None else whole
            figures[way] |= difference(result, whole)
            del result
        for _, way in in_turns(budgets, pairs):
            started = time.process_time()
            prepared(model, width, way, budgets[way]).run(given)
            figures[way]["cpu_s"].append(round(time.process_time() - started, 3))
    return figures


def own_difference(model: str, width: int, frames: int, side: int) -> float:
    """The largest difference of the plain decode from the same in fp64."""
    torch.set_num_threads(1)
    ready = prepared(model, width, PLAIN)
    given = latents(ready.vae, frames, side)
    with torch.no_grad():
        plain = ready.run(given)
        ready.vae.double()
        return (ready.run(given.double()) - plain).abs().max().item()
