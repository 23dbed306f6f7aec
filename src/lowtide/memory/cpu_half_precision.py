"""Measure how bf16 and fp16 change the speed of layers on this CPU.

On CPUs without units for them bf16 and fp16 take 30 to 440 times as long.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

_NAMES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# A linear layer of a window transformer over 64² pixels, and a convolution: enough work for the
# rate of instructions to dominate, and done in milliseconds.
_TOKENS, _CHANNELS, _FEATURES, _SIDE = 4096, 192, 64, 64
_ROUNDS, _SLOW_SECONDS = 5, 0.1
# Ratio to fp32 that counts as slower, and its inverse as faster: less may be noise.
_SLOWER = 1.2


def low_precision_slowdown() -> list[dict[str, str | float]]:
    """Measure the slowdown of bf16 and fp16 against fp32 on the CPU, roughly.

    Returns the ratio of seconds for linear layers and for convolutions, for each dtype.
    Instructions for a dtype do not make it fast: some CPUs run them at half the rate of fp32, and
    without any PyTorch converts value by value. Takes seconds where it is slow, else a tenth, and a
    few MiB.
    """
    return [_slowdown(name) for name in _NAMES]


@functools.cache
def _slowdown(name: str) -> dict[str, str | float]:
    full, low = _seconds(torch.float32), _seconds(_NAMES[name])
    return {"name": name, **{layer: round(low[layer] / full[layer], 2) for layer in full}}


def slowdown_note(
    precision: str, measured: list[dict[str, str | float]] | None = None
) -> str | None:
    """Return a note if ``precision`` slows down layers on the CPU and speeds up none.

    It ends with the way out, the setting that takes fp32.

    Args:
        measured: Result of `low_precision_slowdown`; by default only ``precision`` is measured.

    Returns:
        None where a layer gains or none loses, and for precisions that are not measured.
    """
    if precision not in _NAMES:
        return None
    known = [_slowdown(precision)] if measured is None else measured
    one = next(one for one in known if one["name"] == precision)
    linear, convolution = float(one["linear"]), float(one["convolution"])
    if max(linear, convolution) <= _SLOWER or min(linear, convolution) < 1 / _SLOWER:
        return None
    return (
        f"{precision} saves memory, not time, on this CPU: convolutions take"
        f" {convolution:.2g} times as long as in fp32, linear layers {linear:.2g} times;"
        " fp32 is the fast precision here"
    )


def expected_slowdown(precision: str) -> float:
    """Return how many times as long as in fp32 layers take on the CPU, at least 1."""
    if precision not in _NAMES:
        return 1.0
    return max(1.0, *(float(_slowdown(precision)[layer]) for layer in ("linear", "convolution")))


@functools.cache
@torch.inference_mode()
def _seconds(dtype: torch.dtype) -> dict[str, float]:
    tokens = torch.ones(_TOKENS, _CHANNELS, dtype=dtype)
    weight = torch.ones(_CHANNELS, _CHANNELS, dtype=dtype)
    image = torch.ones(1, _FEATURES, _SIDE, _SIDE, dtype=dtype)
    kernel = torch.ones(_FEATURES, _FEATURES, 3, 3, dtype=dtype)
    return {
        "linear": _min_seconds(lambda: F.linear(tokens, weight)),
        "convolution": _min_seconds(lambda: F.conv2d(image, kernel, padding=1)),
    }


def _min_seconds(run: Callable[[], object]) -> float:
    """Return the seconds of the fastest run: other processes only add time.

    The first counts where it is so slow that what it prepares does not show.
    """
    taken = []
    for _ in range(1 + _ROUNDS):
        started = time.perf_counter()
        run()
        taken.append(time.perf_counter() - started)
        if taken[0] > _SLOW_SECONDS:
            return taken[0]
    return min(taken[1:])
