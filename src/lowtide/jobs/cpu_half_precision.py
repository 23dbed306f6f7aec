"""What half precision does for the time of this machine's processor."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

_NAMES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# A layer of a window transformer over 64² pixels, and one of a convolutional network: enough work
# for the pace of instructions to show, and over in milliseconds.
_TOKENS, _CHANNELS, _FEATURES, _SIDE = 4096, 192, 64, 64
_ROUNDS = 5
# Times as long as in fp32 that count as slower, and its inverse as faster: less may be chance.
_SLOWER = 1.2


@functools.cache
def low_precision_slowdown() -> list[dict[str, str | float]]:
    """How many times as long as in fp32 linear layers and convolutions take on the CPU, roughly.

    Instructions for these numbers are no promise: some processors run them at half the pace of
    those for fp32, and without any PyTorch converts number by number. Takes about a second where
    that is so, else a tenth, and a few MiB.
    """
    with torch.inference_mode():
        usual = _seconds(torch.float32)
        return [
            {
                "name": name,
                **{
                    layer: round(seconds / usual[layer], 2)
                    for layer, seconds in _seconds(dtype).items()
                },
            }
            for name, dtype in _NAMES.items()
        ]


def slowdown_note(precision: str, found: list[dict[str, str | float]] | None = None) -> str | None:
    """A note for who asks the CPU for ``precision`` where no layer gains from it and some lose, by
    what `low_precision_slowdown` ``found``; None elsewhere, and for what it does not measure."""
    if precision not in _NAMES:
        return None
    one = next(one for one in found or low_precision_slowdown() if one["name"] == precision)
    linear, convolution = float(one["linear"]), float(one["convolution"])
    if max(linear, convolution) <= _SLOWER or min(linear, convolution) < 1 / _SLOWER:
        return None
    return (
        f"{precision} saves memory, not time, on this processor: convolutions take"
        f" {convolution:.1f} times as long as in fp32, linear layers {linear:.1f} times"
    )


def _seconds(dtype: torch.dtype) -> dict[str, float]:
    tokens = torch.ones(_TOKENS, _CHANNELS, dtype=dtype)
    weight = torch.ones(_CHANNELS, _CHANNELS, dtype=dtype)
    image = torch.ones(1, _FEATURES, _SIDE, _SIDE, dtype=dtype)
    kernel = torch.ones(_FEATURES, _FEATURES, 3, 3, dtype=dtype)
    return {
        "linear": _least(lambda: F.linear(tokens, weight)),
        "convolution": _least(lambda: F.conv2d(image, kernel, padding=1)),
    }


def _least(run: Callable[[], object]) -> float:
    """Seconds of the shortest of a few runs: others of the machine can only add to it."""
    run()
    taken = []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        run()
        taken.append(time.perf_counter() - started)
    return min(taken)
