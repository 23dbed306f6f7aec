"""Predictions by other tools' methods for the rows that `memory_grid` measured.

    python benchmarks/memory_peers.py

Needs the result file of memory_grid, and accelerate and torchinfo. One row for each method: how far
it is from the measurement where it applies, compared with Lowtide (fitted to other families) on the
same rows. The methods were made for CUDA and get the inputs they need; what they leave out
(accelerate: activations, torchinfo: lifetimes, the constants: any other network) is their authors'
choice.

- accelerate ``estimate-memory``: bytes of weights; for training the largest term of its table.
- torchinfo's "Estimated Total Size": input, weights, and twice every layer's output.
- The table in the guide of AI_FX_Station (docs/LDM4TS_MEMORY_OPTIMIZATION.md): 8.0 GB for a batch
  of 4 and 5.5 GB with checkpointing, here in proportion to the batch; and what its
  ``estimate_vram_usage`` computes instead. Both for training.
- ComfyUI (comfy/sd.py) and InvokeAI (backend/util/vae_working_memory.py): bytes per pixel of the
  Stable Diffusion VAE's image, to which the weights are added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from common import ResultFile
from fit import measured
from memory_summary import errors, held_out
from torch import nn
from zoo import Row

from lowtide.core.units import GIB, MIB
from lowtide.memory.tracing.fake import FakeModelConverter

ABOUT = "Other tools' predictions of the rows of memory_grid; percent of the measured peak."
PACKAGES = ("accelerate", "torchinfo", "diffusers")

Peer = Callable[[Row, nn.Module], float | None]


def accelerate(row: Row, model: nn.Module) -> float:
    """Weights, or the largest of weights, gradients, optimizer and step."""
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    weights, _ = calculate_maximum_sizes(model)
    if row.mode == "inference":
        return weights
    if row.precision == "bf16":  # its command starts from the size in fp32
        weights *= 2
    said = estimate_training_usage(weights, "float32" if row.precision == "fp32" else "bfloat16")
    return max(said.values())


def torchinfo(row: Row, model: nn.Module) -> float:
    """Its total, from a pass over fake tensors, which gives the same figures as real ones."""
    import torchinfo as package

    faker = FakeModelConverter()
    twin, step = faker.model(model), faker.step(row.step())
    low = row.precision == "autocast"
    with faker.fake_mode(), torch.autocast("cpu", torch.bfloat16) if low else nullcontext():
        said = package.summary(
            twin, input_data=list(step.inputs), mode="eval", verbose=0, cache_forward_pass=False
        )
    return said.total_input + said.total_output_bytes + said.total_param_bytes


def guide_table(row: Row, _: nn.Module) -> float | None:
    """2.0 GB for each item of the batch, times 5.5 / 8 with checkpointing."""
    if row.mode != "training":
        return None
    return 2.0 * GIB * row.batch * (1 if row.checkpointing == "none" else 5.5 / 8)


def guide_code(row: Row, _: nn.Module) -> float | None:
    """2.5 GB and 100 feature maps of 4 × 28 × 28 fp32 numbers, half of them checkpointed."""
    if row.mode != "training":
        return None
    maps = row.batch * 100 * 4 * 28 * 28 * 4
    return 2.5 * GIB + maps * (1 if row.checkpointing == "none" else 0.5)


def comfyui(row: Row, model: nn.Module) -> float | None:
    """2178 · 64 bytes per latent pixel, or 1767 per image pixel, times the size of a number."""
    per_pixel = {"sd-decoder": 2178 * 64, "sd-encoder": 1767}.get(row.entry)
    if per_pixel is None:
        return None
    # For one image; ComfyUI then runs as many at once as fit.
    return _weights(model) + per_pixel * row.pixels * _number_bytes(row)


def invokeai(row: Row, model: nn.Module) -> float | None:
    """2200 or 1100 per pixel of the image, and 250 MiB in fp32 for weights that were fp16."""
    per_pixel = {"sd-decoder": 2200 * 64, "sd-encoder": 1100}.get(row.entry)
    if per_pixel is None:
        return None
    upcast = 250 * MIB if row.precision == "fp32" else 0
    weights = _weights(model) * (0.5 if row.precision == "fp32" else 1)
    return weights + upcast + per_pixel * row.pixels * _number_bytes(row)


PEERS: dict[str, Peer] = {
    "accelerate estimate-memory": accelerate,
    "torchinfo": torchinfo,
    "the LDM4TS guide's table": guide_table,
    "the LDM4TS guide's code": guide_code,
    "ComfyUI's VAE constants": comfyui,
    "InvokeAI's VAE constants": invokeai,
}


def _number_bytes(row: Row) -> int:
    return 4 if row.precision == "fp32" else 2


def _weights(model: nn.Module) -> int:
    return sum(weight.nbytes for weight in model.parameters())


def said_by_all(entries: list[dict]) -> Iterator[tuple[str, dict]]:
    """(peer, entry with what it says as ``peer_bytes``), model by model."""
    names = ("entry", "size", "batch", "precision", "mode", "checkpointing")
    models: dict[tuple[str, str], nn.Module] = {}
    for entry in sorted(entries, key=lambda entry: (entry["entry"], entry["precision"])):
        row = Row(**{name: entry[name] for name in names})
        key = row.entry, row.precision
        if key not in models:
            models = {key: row.model()}
        for name, peer in PEERS.items():
            said = peer(row, models[key])
            if said is not None:
                yield name, {**entry, "peer_bytes": said}


def compared(entries: list[dict]) -> dict[str, Any]:
    """The peer's errors and Lowtide's on the same rows."""
    return {"peer": errors(entries, "peer_bytes"), "lowtide": errors(entries)}


def main() -> None:
    """One row for each peer, and one for each peer and mode where it says something of both."""
    entries, _ = held_out(measured("memory_grid"))
    by_peer: dict[str, list[dict]] = {name: [] for name in PEERS}
    for name, entry in said_by_all(entries):
        by_peer[name].append(entry)
    results = ResultFile("memory_peers", about=ABOUT, fresh=True, packages=PACKAGES)
    for name, said in by_peer.items():
        if said:
            results.add(name, **compared(said))
        modes = {mode: [e for e in said if e["mode"] == mode] for mode in ("inference", "training")}
        if all(modes.values()):
            for mode, part in modes.items():
                results.add(f"{name}, {mode}", **compared(part))


if __name__ == "__main__":
    main()
