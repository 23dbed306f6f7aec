"""The models of the zoo: ten families and more, sized for a machine with two cores."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from zoo_nets import ConvNet, DiffusionTransformer, HalfOfVae

import lowtide
from lowtide.core.units import MIB
from lowtide.memory.tracing.checkpointing import CHECKPOINTING, Checkpointing

# Layers that change their input in place rule selective checkpointing out.
_NOT_SELECTIVE: tuple[Checkpointing, ...] = ("none", "full")


@dataclass(frozen=True)
class Costs:
    """A rough idea of a model for choosing rows: bytes of fp32 weights, then bytes per input
    pixel in fp32 (scratch not counted), and the share of these that autocast takes."""

    weights: int
    inference: int
    none: int = 0
    full: int = 0
    selective: int = 0
    autocast: float = 0.55


@dataclass(frozen=True)
class Entry:
    """One model of the zoo, with the sizes (sides in pixels) at which it is run.

    ``casts_bf16`` says whether all of it can be cast to bf16; otherwise its low precision is
    autocast. ``inputs`` makes what the model is called with, in fp32.
    """

    name: str
    family: str
    build: Callable[[], nn.Module]
    sizes: tuple[int, ...]
    training_sizes: tuple[int, ...]
    costs: Costs
    batches: tuple[int, ...] = (1, 2)
    casts_bf16: bool = True
    checkpointing: tuple[Checkpointing, ...] = CHECKPOINTING
    inputs: Callable[[int, int], tuple[Tensor, ...]] = lambda size, batch: (
        torch.rand(batch, 3, size, size),
    )
    package: str = "spandrel"

    @property
    def trainable(self) -> bool:
        """Whether training steps of it are in the grid."""
        return bool(self.training_sizes)


def _made_by(module: str, name: str, **options: Any) -> Callable[[], nn.Module]:
    """A model from a library that is imported when it is built."""
    return lambda: getattr(importlib.import_module(module), name)(**options)


def _spandrel(module: str, name: str, **options: Any) -> Callable[[], nn.Module]:
    family, _, file = module.partition(".")
    return _made_by(f"spandrel.architectures.{family}.__arch.{file}", name, **options)


def _vae(widths: tuple[int, ...], layers: int, half: str = "") -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        kinds = ("DownEncoderBlock2D",) * len(widths), ("UpDecoderBlock2D",) * len(widths)
        whole = _made_by(
            "diffusers",
            "AutoencoderKL",
            block_out_channels=widths,
            down_block_types=kinds[0],
            up_block_types=kinds[1],
            layers_per_block=layers,
        )()
        return HalfOfVae(whole, decoder=half == "decoder") if half else whole

    return build


def _latents(size: int, batch: int) -> tuple[Tensor, ...]:
    return (torch.randn(batch, 4, size, size),)


def _latents_and_times(size: int, batch: int) -> tuple[Tensor, ...]:
    return torch.randn(batch, 4, size, size), torch.linspace(10.0, 900.0, batch)


def _images_and_time(size: int, batch: int) -> tuple[Tensor, ...]:
    return torch.rand(batch, 3, size, size), torch.tensor([500])


_SD_WIDTHS = (128, 256, 512, 512)

_ENTRIES = [
    Entry(
        "conv",
        "convolution",
        ConvNet,
        (448, 704, 1024),
        (192, 320, 448),
        Costs(2 * MIB, 1036, 4789, 3009, 6837),
        package="torch",
    ),
    Entry(
        "lowtide-x2",
        "lowtide",
        lambda: lowtide.load("lowtide-x2").module,
        (640, 1024, 1536),
        (288, 448, 640),
        Costs(MIB // 4, 396, 1787),
        checkpointing=("none",),
        package="lowtide",
    ),
    Entry(
        "lowtide-x4",
        "lowtide",
        lambda: lowtide.load("lowtide-x4").module,
        (512, 832, 1216),
        (224, 352, 512),
        Costs(MIB, 588, 3656),
        checkpointing=("none",),
        package="lowtide",
    ),
    Entry(
        "esrgan",
        "ESRGAN",
        _spandrel("ESRGAN.RRDB", "RRDBNet", num_filters=32, num_blocks=4, scale=4),
        (192, 320, 448),
        (64, 100, 144),
        Costs(7 * MIB, 4108, 39851, 11179),
        checkpointing=_NOT_SELECTIVE,
    ),
    Entry(
        "unet",
        "U-Net",
        _made_by(
            "diffusers",
            "UNet2DModel",
            block_out_channels=(64, 128, 192, 256),
            layers_per_block=1,
            attention_head_dim=64,
            down_block_types=("DownBlock2D",) * 3 + ("AttnDownBlock2D",),
            up_block_types=("AttnUpBlock2D",) + ("UpBlock2D",) * 3,
        ),
        (224, 352, 448),
        (96, 160, 224),
        Costs(56 * MIB, 3340, 12286, 5832, 8440),
        inputs=_images_and_time,
        package="diffusers",
    ),
    Entry(
        "drct",
        "DRCT",
        _spandrel(
            "DRCT.drct_arch",
            "DRCT",
            img_size=64,
            window_size=16,
            embed_dim=60,
            depths=(6, 6),
            num_heads=(6, 6),
            gc=16,
            upscale=4,
            upsampler="pixelshuffle",
        ),
        (96, 160, 256),
        (32, 64, 96),
        Costs(25 * MIB, 17623, 84000, 35000, autocast=0.92),
        casts_bf16=False,
        checkpointing=_NOT_SELECTIVE,
    ),
    Entry(
        "swinir",
        "SwinIR",
        _spandrel(
            "SwinIR.SwinIR",
            "SwinIR",
            img_size=64,
            window_size=8,
            embed_dim=60,
            depths=(6, 6),
            num_heads=(6, 6),
            mlp_ratio=2,
            upscale=2,
            upsampler="pixelshuffledirect",
        ),
        (180, 300, 400),
        (48, 84, 128),
        Costs(8 * MIB, 5800, 58200, 29400, 29900, autocast=0.82),
        casts_bf16=False,
    ),
    Entry(
        "hat",
        "HAT",
        _spandrel(
            "HAT.HAT",
            "HAT",
            img_size=64,
            window_size=16,
            embed_dim=96,
            depths=(6, 6),
            num_heads=(6, 6),
            upscale=4,
            upsampler="pixelshuffle",
        ),
        (64, 112, 160),
        (32, 48, 64),
        Costs(13 * MIB, 35000, 222000, 123000, autocast=0.97),
        checkpointing=_NOT_SELECTIVE,
    ),
    Entry(
        "dit",
        "DiT",
        DiffusionTransformer,
        (128, 192, 256),
        (64, 96, 128),
        Costs(59 * MIB, 5000, 42000, 5000, 6000),
        inputs=_latents_and_times,
        package="torch",
    ),
    Entry(
        "vae",
        "AutoencoderKL",
        _vae((64, 128, 256, 256), 1),
        (288, 448, 640),
        (128, 192, 272),
        Costs(59 * MIB, 1550, 9761, 2961, 5425),
        package="diffusers",
    ),
    Entry(
        "sd-decoder",
        "AutoencoderKL",
        _vae(_SD_WIDTHS, 2, "decoder"),
        (20, 32, 40),
        (),
        Costs(189 * MIB, 196640),
        inputs=_latents,
        package="diffusers",
    ),
    Entry(
        "sd-encoder",
        "AutoencoderKL",
        _vae(_SD_WIDTHS, 2, "encoder"),
        (192, 320, 416),
        (),
        Costs(131 * MIB, 2572),
        package="diffusers",
    ),
    Entry(
        "scunet",
        "SCUNet",
        _spandrel("SCUNet.SCUNet", "SCUNet", config=[2] * 7, dim=64),
        (192, 320, 448),
        (64, 128, 192),
        Costs(37 * MIB, 2860, 30000, 5000),
        checkpointing=_NOT_SELECTIVE,
    ),
    Entry(
        "plksr",
        "PLKSR",
        _spandrel("PLKSR.PLKSR", "PLKSR", dim=48, n_blocks=8, upscaling_factor=2),
        (448, 640, 832),
        (128, 192, 272),
        Costs(4 * MIB, 972, 14316, 3564, 10812),
    ),
    Entry(
        "nafnet",
        "NAFNet",
        _spandrel(
            "NAFNet.NAFNet_arch",
            "NAFNet",
            width=24,
            middle_blk_num=2,
            enc_blk_nums=[1, 1, 2],
            dec_blk_nums=[1, 1, 1],
        ),
        (480, 760, 1080),
        (192, 300, 432),
        Costs(4 * MIB, 776, 6571, 2392, 4931, autocast=0.6),
    ),
    Entry(
        "dat",
        "DAT",
        _spandrel(
            "DAT.DAT",
            "DAT",
            img_size=64,
            embed_dim=60,
            split_size=[8, 16],
            depth=[3, 3],
            num_heads=[6, 6],
            expansion_factor=2,
            upscale=2,
            upsampler="pixelshuffledirect",
        ),
        (96, 160, 224),
        (48, 64, 96),
        Costs(8 * MIB, 6719, 40000, 19000, 21000, autocast=0.6),
        batches=(2, 3),
    ),
]


def _trained_craft() -> list[Entry]:
    """A trained model file, where the folder of real data has it."""
    path = Path(os.environ.get("LOWTIDE_DATA", "")) / "models" / "craft_x4.pth"
    if not path.is_file():
        return []
    return [
        Entry(
            "craft",
            "CRAFT",
            lambda: lowtide.load(path).module,
            (176, 256, 352),
            (24, 40, 56),
            Costs(3 * MIB, 5000, 200000, 50000, 92000),
            package="lowtide",
        )
    ]


ENTRIES = {entry.name: entry for entry in [*_ENTRIES, *_trained_craft()]}
