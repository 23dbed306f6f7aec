"""Attention of the denoiser at its top level: memory and time of training steps.

    python benchmarks/denoise_attention.py [--only TEXT] [--pairs 3] [--fresh]

fp32 on the CPU, with as many threads as OMP_NUM_THREADS says. In fresh processes, whose heap keeps:

modules: one attention of 32 channels on 128² pixels, forward and backward. "Scores in memory" is
    softmax attention as PyTorch computes it without a fused kernel.
networks: a step of a SlimUNet with 32, 64 and 128 channels on an image of 256², so that its top
    level is 128² pixels with 32 channels, and attention there, where nobody has it unless asked;
    with checkpointing and without.

Peaks are of live tensors by the allocator's events, beyond what is there between steps. Seconds are
the processor's, in turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from common import HEAP_KEEPS, ResultFile, in_turns, ratio_of, row_parser
from subprocess_run import measure_in_subprocess
from torch.nn.attention import SDPBackend, sdpa_kernel
from training_memory import compare

from lowtide.attention.spatial import ChannelAttention, LinearAttention
from lowtide.memory.live_peak import live_peak_bytes
from lowtide.models.denoiser.config import SlimUNetConfig
from lowtide.models.denoiser.slim_unet import GlobalAttention, SlimUNet

CHANNELS, SIDE = 32, 128
MODULES = {
    "linear": LinearAttention,
    "channel": ChannelAttention,
    "sdpa": GlobalAttention,
    "sdpa, scores in memory": GlobalAttention,
}
NETWORKS = ("none", "linear", "channel", "sdpa")
WAYS = ("none", "full")


def compare_modules(pairs: int) -> dict[str, dict[str, Any]]:
    """Peaks and processor seconds of each module."""
    calls: dict[str, Callable[[], None]] = {}
    for name, make in MODULES.items():
        torch.manual_seed(0)
        module = make(CHANNELS)
        image = torch.randn(1, CHANNELS, SIDE, SIDE, requires_grad=True)
        fused = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
        kinds = [SDPBackend.MATH] if "scores" in name else fused

        def call(module=module, image=image, kinds=kinds) -> None:
            module.zero_grad()
            image.grad = None
            with sdpa_kernel(kinds):
                module(image).square().mean().backward()

        calls[name] = call
    return _measured(calls, pairs)


def compare_checkpointing(attention: str, pairs: int) -> dict[str, dict[str, Any]]:
    """Peaks and processor seconds of a step, and how gradients differ."""
    steps: dict[str, Callable[[], None]] = {}
    networks = {}
    image, target = torch.randn(2, 1, 3, 2 * SIDE, 2 * SIDE).unbind()
    for way in WAYS:
        torch.manual_seed(0)
        levels = {"attention_levels": (0,)} if attention != "none" else {}
        network = SlimUNet(SlimUNetConfig(features=CHANNELS, attention=attention, **levels))
        network.checkpointing = way == "full"
        optimizer = torch.optim.AdamW(network.parameters(), 1e-4)

        def step(network=network, optimizer=optimizer) -> None:
            optimizer.zero_grad()
            film = network.modulation(torch.tensor([0.2]))
            (network(image, film) - target).square().mean().backward()
            optimizer.step()

        steps[way], networks[way] = step, network
        step()  # makes the optimizer's state
        optimizer.zero_grad()
    found = _measured(steps, pairs)
    weights = [list(one.parameters()) for one in networks.values()]
    for way, own in zip(networks, weights, strict=True):
        pairs_of = zip(own, weights[0], strict=True)
        found[way]["max_weight_difference"] = max((a - b).abs().max().item() for a, b in pairs_of)
    return found


def _measured(calls: dict[str, Callable[[], None]], pairs: int) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {
        name: {"cpu_s": [], "activations_bytes": live_peak_bytes(call)}
        for name, call in calls.items()
    }
    for _, name in in_turns(calls, pairs):
        started = time.process_time()
        calls[name]()
        found[name]["cpu_s"].append(round(time.process_time() - started, 4))
    return found


def main() -> None:
    """Measure what is missing."""
    options = row_parser(__doc__, pairs=3).parse_args()
    results = ResultFile(
        "denoise_attention",
        fresh=options.fresh,
        about=(
            f"Attention at {SIDE}² pixels with {CHANNELS} channels: one module alone, and training"
            " steps of a denoiser with it, checkpointed and not."
        ),
    )

    def run(row: str, function: str, *given: Any) -> dict[str, dict[str, Any]] | None:
        if options.only not in row or results.has(row):
            return None
        where = f"denoise_attention:{function}"
        return measure_in_subprocess(where, *given, options.pairs, env=HEAP_KEEPS).result

    if found := run("modules", "compare_modules"):
        base = found["linear"]["cpu_s"]
        for figures in found.values():
            figures["ratio"] = ratio_of(figures["cpu_s"], base)
        results.add("modules", part="modules", threads=torch.get_num_threads(), ways=found)
    for attention in NETWORKS:
        row = f"networks, {attention}"
        if found := run(row, "compare_checkpointing", attention):
            threads = torch.get_num_threads()
            results.add(row, part="networks", threads=threads, ways=compare(found))


if __name__ == "__main__":
    main()
