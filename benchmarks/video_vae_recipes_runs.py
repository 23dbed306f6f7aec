"""What ``video_vae_recipes.py`` runs in fresh processes: one decode, with one recipe each."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import in_turns
from streaming_runs import difference
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import lowtide
from lowtide.core.metrics import ssim
from lowtide.jobs.clips.result import ClipResult, ComputedFrame, ContainerWriter
from lowtide.jobs.clips.task import VideoTask
from lowtide.jobs.clips.work import SegmentsFolder
from lowtide.jobs.vae.frames import images_of, planes_of
from lowtide.jobs.vae.latents import default_clip_facts, task_of_latents
from lowtide.jobs.vae.settings import VaeSettings
from lowtide.models.video_vae import VideoVAE, VideoVAEConfig

Decode = Callable[[Tensor], Tensor]

CONFIG = VideoVAEConfig(
    block_out_channels=(32, 32, 64, 64), layers_per_block=1, norm_num_groups=8, latent_channels=16
)
FRAMES, SIDE, SPACE = 17, 128, 8
# Sides of tiles and their distance where they overlap, in latents.
TILE, STRIDE = 8, 6
SLICED = "slices of one latent"
# Of the plain peak, in percent.
SHARES = 80, 60, 30


def latents() -> Tensor:
    """Normal latents (1, 16, 5, 16, 16) of the clip."""
    generator = torch.Generator().manual_seed(1)
    shape = 1, CONFIG.latent_channels, 1 + (FRAMES - 1) // 4, SIDE // SPACE, SIDE // SPACE
    return torch.randn(shape, generator=generator)


def model() -> VideoVAE:
    """The autoencoder with random weights."""
    torch.manual_seed(0)
    return VideoVAE(CONFIG).requires_grad_(False).eval()


def in_slices(vae: VideoVAE, number: int) -> Decode:
    """The decode in slices of so many latents, with the state between them."""

    def decode(given: Tensor) -> Tensor:
        made, state = [], None
        for part in given.split(number, 2):
            frames, state = vae.decode_slice(part, state)
            made.append(frames)
        return torch.cat(made, 2)

    return decode


def in_tiles(vae: VideoVAE, stride: int, *, weighted: bool) -> Decode:
    """The decode in square tiles: blended by weights, or each copied to its place."""

    def decode(given: Tensor) -> Tensor:
        batch, _, _, height, width = given.shape
        shape = batch, 3, FRAMES, height * SPACE, width * SPACE
        result, weights = given.new_zeros(shape), given.new_zeros(shape)
        for top in _starts(height, stride):
            for left in _starts(width, stride):
                tile = vae.decode(given[..., top : top + TILE, left : left + TILE])
                place = _place(result, top, left)
                if weighted:
                    ramp = _ramp(TILE * SPACE, (TILE - stride) * SPACE)
                    ramp = (ramp[:, None] * ramp).to(tile)
                    place += tile * ramp
                    _place(weights, top, left).add_(ramp)
                else:
                    place.copy_(tile)
        return result / weights if weighted else result

    return decode


def _starts(size: int, stride: int) -> list[int]:
    starts = list(range(0, size - TILE, stride))
    return [*starts, size - TILE]


def _place(whole: Tensor, top: int, left: int) -> Tensor:
    side = TILE * SPACE
    return whole.narrow(3, top * SPACE, side).narrow(4, left * SPACE, side)


def _ramp(side: int, overlap: int) -> Tensor:
    """Weights that rise and fall over the overlap."""
    at = torch.arange(side, dtype=torch.float32) + 1
    edge = torch.minimum(at, at.flip(0))
    return (edge / max(1, overlap)).clamp(max=1)


def _with_math(decode: Decode) -> Decode:
    def run(given: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return decode(given)

    return run


def recipe(name: str, plain_peak: int = 0) -> Decode:
    """The decode by the recipe of a row."""
    vae = model()
    if name in _NUMBERS:
        return in_slices(vae, _NUMBERS[name])
    if name == "scores in memory":
        return _with_math(vae.decode)
    if name == "channels_last_3d weights":
        return vae.to(memory_format=torch.channels_last_3d).decode
    if name == "torch.compile":
        vae.decoder.compile()
        return vae.decode
    if name in _TILES:
        stride, weighted = _TILES[name]
        return in_tiles(vae, stride, weighted=weighted)
    share = next(share for share in SHARES if BANDS.format(share) == name)
    pages = "disk" if share == min(SHARES) else "memory"
    lowtide.fit(vae, budget=plain_peak * share // 100, pages=pages)
    return vae.decode


BANDS = "bands in {} % of the plain peak"
_NUMBERS = {SLICED: 1, "slices of two latents": 2, "the whole clip": 5}
_TILES = {
    "tiles that overlap, blended": (STRIDE, True),
    "tiles without overlap, with weights": (TILE, True),
    "tiles without overlap, copied": (TILE, False),
}
RECIPES = (
    *_NUMBERS,
    "scores in memory",
    "channels_last_3d weights",
    "torch.compile",
    *_TILES,
    *map(BANDS.format, SHARES),
)


def run_once(name: str, plain_peak: int) -> dict[str, Any]:
    """One decode, after a first one that is not measured."""
    torch.set_num_threads(1)
    if name not in _ready:
        _ready[name] = recipe(name, plain_peak)
    with torch.no_grad():
        return {"result_bytes": _ready[name](latents()).nbytes}


_ready: dict[str, Decode] = {}


def run_times(plain_peak: int, pairs: int) -> dict[str, dict[str, Any]]:
    """Processor seconds of each recipe in turns, and what its result is next to the plain one."""
    torch.set_num_threads(1)
    figures: dict[str, dict[str, Any]] = {name: {"cpu_s": []} for name in RECIPES}
    given, ways = latents(), dict[str, Decode]()
    with torch.no_grad():
        plain = recipe(SLICED)(given)
        for name in RECIPES:
            started = time.process_time()
            ways[name] = recipe(name, plain_peak)
            result = ways[name](given)
            figures[name]["first_call_cpu_s"] = round(time.process_time() - started, 2)
            figures[name] |= difference(result, plain) | {"ssim": similarity(result, plain)}
        for _, name in in_turns(RECIPES, pairs):
            started = time.process_time()
            ways[name](given)
            figures[name]["cpu_s"].append(round(time.process_time() - started, 3))
    return figures


def similarity(result: Tensor, plain: Tensor) -> float:
    """Mean SSIM of the frames, in the range of the plain ones."""
    low, span = plain.min(), plain.max() - plain.min()
    pairs = zip(*(((one - low) / span)[0].unbind(1) for one in (result, plain)), strict=True)
    frames = [(a.permute(1, 2, 0).numpy(), b.permute(1, 2, 0).numpy()) for a, b in pairs]
    return round(sum(ssim(a, b) for a, b in frames) / len(frames), 5)


class LatentModel(nn.Module):
    """A small network for latents, with random weights: it stands for a diffusion model's step."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        channels = CONFIG.latent_channels
        self.head = nn.Conv3d(channels, width, 3, padding=1)
        self.body = nn.ModuleList(nn.Conv3d(width, width, 3, padding=1) for _ in range(4))
        self.tail = nn.Conv3d(width, channels, 3, padding=1)

    def forward(self, given: Tensor) -> Tensor:
        """Return latents (B, C, n, h, w) of the same shape."""
        hidden = self.head(given)
        for layer in self.body:
            hidden = hidden + layer(F.silu(hidden))
        return given + 0.1 * self.tail(hidden)


def write_video(frames: Tensor, task: VideoTask, target: Path) -> None:
    """Write frames (1, 3, T, H, W) in -1..1 as a video."""
    (segment,) = task.segments(target, task.frames)
    work = SegmentsFolder(target, "")
    result = ClipResult(ContainerWriter(target, task, work, [segment], replace=True))
    for number, image in enumerate(images_of(frames, SIDE, SIDE)):
        result.write_frame(ComputedFrame(segment, number, planes_of(image, task)))
    result.commit()


def run_phases(turns: int) -> dict[str, Any]:
    """Processor seconds of encode, model, decode and write, the least of some turns."""
    torch.set_num_threads(1)
    vae, network = model(), LatentModel().requires_grad_(False).eval()
    generator = torch.Generator().manual_seed(2)
    clip = F.interpolate(torch.rand(3, FRAMES, 9, 9, generator=generator), (SIDE, SIDE))[None]
    seconds: dict[str, list[float]] = {}
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "out.mkv")
        facts = default_clip_facts(FRAMES, SIDE, SIDE, 25.0)
        encoder = VaeSettings.of(model=target).encoder_settings(8, target)
        task = task_of_latents(target, target, facts, encoder)
        phases: dict[str, Callable[[Any], Any]] = {
            "encode": lambda frames: vae.encode(2 * frames - 1),
            "model": network,
            "decode": vae.decode,
            "write": lambda frames: write_video(frames, task, target),
        }
        for _ in range(turns):
            given: Any = clip
            target.unlink(missing_ok=True)
            for name, run in phases.items():
                started = time.process_time()
                given = run(given)
                seconds.setdefault(f"{name}_s", []).append(time.process_time() - started)
    least = {name: round(min(values), 3) for name, values in seconds.items()}
    return {**least, "frames": FRAMES, "fps": round(FRAMES / sum(least.values()), 2)}
