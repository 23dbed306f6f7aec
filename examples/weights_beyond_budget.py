"""Make an image with 400 MiB of weights in 200 MiB of memory, and compare it with the plain run.

    python examples/weights_beyond_budget.py

Group offloading of diffusers keeps the weights of the transformer on disk and loads one block at a
time; `lowtide.fit` decodes the image in bands of rows. A module is for one of the two: `fit`
refuses an autoencoder whose inner layers are offloaded.
"""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline
from diffusers.models import FluxTransformer2DModel
from diffusers.utils import logging
from safetensors.torch import load_file, save_file

import lowtide
from lowtide.core.units import format_bytes
from lowtide.memory.meter import HostMemoryMeter

# The prompt is embedded already: no text encoder is needed.
NO_TEXT = dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
PROMPT = {"prompt_embeds": torch.ones(1, 8, 64), "pooled_prompt_embeds": torch.ones(1, 64)}
SIZE = {"height": 512, "width": 512, "num_inference_steps": 1}


def save_pipeline(folder: Path) -> None:
    """A small Flux of random weights, in files that are let go one by one."""
    depth = {"num_layers": 2, "num_single_layers": 21, "num_attention_heads": 4}
    prompt = {"joint_attention_dim": 64, "pooled_projection_dim": 64}
    levels = {"block_out_channels": (32, 64, 64, 64), "latent_channels": 16, "norm_num_groups": 8}
    levels |= {"down_block_types": ("DownEncoderBlock2D",) * 4}
    levels |= {"up_block_types": ("UpDecoderBlock2D",) * 4}
    FluxPipeline(
        FlowMatchEulerDiscreteScheduler(),
        vae=AutoencoderKL(**levels, shift_factor=0.1),
        transformer=FluxTransformer2DModel(**depth, **prompt),
        **NO_TEXT,
    ).save_pretrained(folder, max_shard_size="32MB")


def run(how: str, folder: Path) -> None:
    """Save the image, and print the most memory that was resident."""
    meter = HostMemoryMeter()
    meter.start()
    pipe = FluxPipeline.from_pretrained(folder / "pipeline", **NO_TEXT)
    if how == "paged":
        # Offloading to the host's memory, without a path, only helps a GPU. The folder has to be
        # new: files that another module left there would be taken for the weights of this one.
        where = {"onload_device": torch.device("cpu"), "offload_to_disk_path": str(folder / "new")}
        pipe.transformer.enable_group_offload(**where, num_blocks_per_group=1)
        lowtide.fit(pipe.vae, budget="64MiB")
    draw = torch.Generator().manual_seed(0)
    images = pipe(**PROMPT, **SIZE, generator=draw, output_type="pt").images
    usage = meter.lap()
    meter.stop()
    save_file({"images": images}, folder / f"{how}.safetensors")
    # The kernel's figure counts the weights as long as their files are mapped.
    print(how, "run:", format_bytes(usage.high_water_bytes or usage.peak_bytes))


if __name__ == "__main__":
    logging.set_verbosity_error()
    if sys.argv[1:]:  # the paged run has a process of its own
        run("paged", Path(sys.argv[1]))
        sys.exit()
    # Freed memory has to go back at once, else weights on disk would keep their room in it.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    with TemporaryDirectory() as folder:
        save_pipeline(Path(folder, "pipeline"))
        subprocess.run([sys.executable, __file__, folder], env=environment, check=True)
        run("plain", Path(folder))
        paged = load_file(Path(folder, "paged.safetensors"))["images"]
        plain = load_file(Path(folder, "plain.safetensors"))["images"]
        print(f"largest difference of the images: {(plain - paged).abs().max():g}")
