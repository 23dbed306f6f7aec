"""How long it takes to say what a run will use: tracing, and whole plans.

    python benchmarks/planning.py [--fresh]

Processor seconds, after one warm-up in the same process (the first trace imports a thousand
modules; that is a row of its own). Traces are of whole training steps and of inference, plans of a
12-megapixel photograph in 2 GiB. A cold plan measures the model first, a warm one remembers.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from common import ResultFile
from photographs import photograph
from torch import nn

from lowtide.memory.prediction.estimate import estimate, trace_step
from lowtide.memory.tracing.steps import InferenceStep, Step, TrainingStep

_TIMES = 5


class Block(nn.Module):
    """A transformer block with conditioning, as in DiT (Peebles and Xie, arXiv:2212.09748)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.condition = nn.Linear(width, 6 * width)

    def forward(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        """(batch, tokens, width) and (batch, width) to (batch, tokens, width)."""
        shift, scale, gate, shift2, scale2, gate2 = self.condition(c)[:, None].chunk(6, -1)
        y = self.norms[0](x) * (1 + scale) + shift
        q, k, v = self.into(y).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + gate * self.out(y.transpose(1, 2).flatten(2))
        y = self.norms[1](x) * (1 + scale2) + shift2
        return x + gate2 * self.narrow(nn.functional.gelu(self.wide(y), approximate="tanh"))


class DiT(nn.Module):
    """Blocks alone: 24 of width 1728 have 1.0 billion weights."""

    def __init__(self, width: int = 1728, depth: int = 24, heads: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))

    def forward(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        """(batch, tokens, width) and (batch, width) to (batch, tokens, width)."""
        for block in self.blocks:
            x = block(x, c)
        return x


def drct() -> nn.Module:
    """DRCT as published (Hsu et al., arXiv:2404.00722)."""
    from spandrel.architectures.DRCT.__arch.drct_arch import DRCT

    return DRCT(
        img_size=64,
        window_size=16,
        embed_dim=180,
        depths=(6,) * 6,
        num_heads=(6,) * 6,
        gc=32,
        upscale=4,
        upsampler="pixelshuffle",
    )


def models() -> dict[str, tuple[nn.Module, tuple[torch.Tensor, ...]]]:
    """Model and inputs, all without bytes."""
    from diffusers import AutoencoderKL, UNet2DModel

    with torch.device("meta"):
        dit = DiT()
        tokens = torch.empty(1, 4096, 1728), torch.empty(1, 1728)
        image, latent = torch.empty(1, 3, 64, 64), torch.empty(1, 3, 256, 256)
    autoencoder = AutoencoderKL(
        block_out_channels=(128, 256, 512, 512),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=2,
    )
    unet = UNet2DModel(sample_size=64, block_out_channels=(128, 256, 384, 512))
    return {
        "DiT": (dit, tokens),
        "DRCT": (drct(), (image,)),
        "AutoencoderKL": (autoencoder, (latent,)),
        "U-Net": (unet, (image, torch.zeros(1, dtype=torch.long))),
    }


def seconds_of(call: Callable[[], object], times: int = _TIMES) -> dict[str, float]:
    """Median and spread of processor seconds, after one call that does not count."""
    call()
    taken = []
    for _ in range(times):
        started = time.process_time()
        call()
        taken.append(time.process_time() - started)
    return {
        "cpu_s": round(statistics.median(taken), 3),
        "min": round(min(taken), 3),
        "max": round(max(taken), 3),
    }


def traces(results: ResultFile) -> None:
    """Rows for tracing alone, and the median over them."""
    for name, (model, inputs) in models().items():
        weights = sum(weight.numel() for weight in model.parameters())
        steps: dict[str, Step] = {
            "inference": InferenceStep(inputs),
            "training": TrainingStep(inputs),
            "training, full checkpointing": TrainingStep(inputs, checkpointing="full"),
        }
        for kind, step in steps.items():
            row = f"trace {name}, {kind}"
            if results.has(row):
                continue
            taken = seconds_of(lambda model=model, step=step: trace_step(model, step))
            operators = len(trace_step(model, step).ops)
            gpu = seconds_of(
                lambda model=model, step=step: estimate(model, step, device="rtx4090"), 3
            )
            results.add(row, weights=weights, operators=operators, **taken, estimate=gpu)
    rows = [row for row in results.data["rows"] if row["row"].startswith("trace ")]
    if not results.has("tracing, median"):
        results.add("tracing, median", cpu_s=statistics.median(row["cpu_s"] for row in rows))


def plans(results: ResultFile) -> None:
    """Rows for plans of the bundled models and of a DRCT, cold and warm."""
    from safetensors.torch import save_file

    import lowtide
    from lowtide.core.heap import tune_heap

    tune_heap()
    with tempfile.TemporaryDirectory() as folder:
        source = photograph(Path(folder) / "photo.jpg", 4242, 2828)
        file = Path(folder) / "drct.safetensors"
        save_file({k: v.contiguous() for k, v in drct().state_dict().items()}, file)
        import os

        os.environ["LOWTIDE_CACHE"] = str(Path(folder) / "cache")
        for name, model in {"lowtide-x2": None, "lowtide-x4": None, "DRCT": file}.items():
            row = f"plan {name}"
            if results.has(row):
                continue

            def once(model: str | Path = model or name) -> object:
                return lowtide.plan(source, Path(folder) / "o.png", model=model, budget="2GiB")

            started = time.process_time()
            once()
            cold = time.process_time() - started
            results.add(row, cold_cpu_s=round(cold, 2), **seconds_of(once, 3))


def first(results: ResultFile) -> None:
    """What the first trace of a process takes."""
    if results.has("first trace of a process"):
        return
    import subprocess

    code = (
        "import time, torch; t = time.process_time();"
        "from lowtide.memory.prediction.estimate import trace_step;"
        "from lowtide.memory.tracing.steps import InferenceStep;"
        "trace_step(torch.nn.Conv2d(3, 3, 3), InferenceStep((torch.empty(1, 3, 64, 64),)));"
        "print(time.process_time() - t)"
    )
    taken = [
        float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout)
        for _ in range(_TIMES)
    ]
    results.add("first trace of a process", cpu_s=round(statistics.median(taken), 2))


def main() -> None:
    """Measure what is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fresh", action="store_true", help="drop earlier rows")
    results = ResultFile(
        "planning",
        fresh=parser.parse_args().fresh,
        packages=("diffusers",),
        about="Processor seconds of traces and of plans.",
    )
    first(results)
    traces(results)
    plans(results)


if __name__ == "__main__":
    main()
