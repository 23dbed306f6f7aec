"""Run a transformer with 400 MiB of weights in 200 MiB of memory, and compare the results.

    python examples/weights_beyond_budget.py

The streamed and the resident run each have a process of their own, so that neither profits from
what the other left in memory.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from lowtide.core.units import MIB, format_bytes
from lowtide.memory.meter import HostMeter
from lowtide.memory.offload.offload_plan import plan_offload
from lowtide.memory.offload.stream import stream_from_file

WIDTH, HEADS, LAYERS, TOKENS = 768, 12, 15, 256
BUDGET, ACTIVATIONS = 200 * MIB, 16 * MIB


class Layer(nn.Module):
    """A residual transformer layer: 27 MiB of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.before_attention(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        return x + self.mlp(self.before_mlp(x))


def build() -> nn.Module:
    """The model without memory for its weights."""
    with torch.device("meta"):
        return nn.Sequential(*(Layer() for _ in range(LAYERS))).eval()


def write(folder: Path) -> None:
    """Random weights, one file for each layer; only one layer is in memory at a time."""
    for index in range(LAYERS):
        torch.manual_seed(index)
        weights = {f"{index}.{name}": tensor for name, tensor in Layer().state_dict().items()}
        save_file(weights, folder / f"layer-{index:02}.safetensors")


def run(how: str, folder: Path) -> None:
    """One of the two runs: saves its result, prints what it used."""
    x = torch.linspace(-1, 1, TOKENS * WIDTH).view(1, TOKENS, WIDTH)
    files = sorted(folder.glob("layer-*.safetensors"))
    with torch.inference_mode():
        Layer()(x)  # libraries load on first use; what they take is not the model's
        model = build()
        meter = HostMeter()
        meter.start()
        if how == "streamed":
            plan = plan_offload(model, BUDGET, activation_bytes=ACTIVATIONS)
            with stream_from_file(model, files, plan):
                y = model(x)
            about = plan.title
        else:
            for file in files:
                weights = {name: tensor.clone() for name, tensor in load_file(file).items()}
                model.load_state_dict(weights, strict=False, assign=True)
            y, about = model(x), "all weights resident"
    peak = meter.peak_bytes
    meter.stop()
    save_file({"y": y}, folder / f"{how}.safetensors")
    weights = sum(parameter.nbytes for parameter in model.parameters())
    print(json.dumps({"about": about, "peak": peak, "weights": weights}))


def main() -> None:
    """Write the weights, run twice, compare."""
    # Freed memory goes back at once, so that the meter sees what is in use and nothing else.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        for how in ("streamed", "resident"):
            command = [sys.executable, __file__, how, folder]
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
            report = json.loads(done.stdout)
            print(f"{how:9} {report['about']}")
            print(
                f"{'':9} peak {format_bytes(report['peak'])},"
                f" weights {format_bytes(report['weights'])}"
            )
        streamed, resident = (
            load_file(Path(folder) / f"{how}.safetensors")["y"] for how in ("streamed", "resident")
        )
        print(f"budget    {format_bytes(BUDGET)}")
        print(f"largest difference of the results: {(streamed - resident).abs().max():g}")


if __name__ == "__main__":
    if sys.argv[1:]:
        run(sys.argv[1], Path(sys.argv[2]))
    else:
        main()
