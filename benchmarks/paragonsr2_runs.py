"""What ``paragonsr2_variants.py`` runs in fresh processes: every ParagonSR2, with fixed weights."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import in_turns
from torch import Tensor, nn

from lowtide.core.heap import tune_heap
from lowtide.models import lowtide_files
from lowtide.models.paragonsr2.config import VARIANTS, Tier, TierConfig, VariantConfig
from lowtide.models.paragonsr2.tiers import ParagonTier
from lowtide.models.paragonsr2.variant import ParagonVariant
from lowtide.streaming.api import Streamed

TIERS: tuple[Tier, ...] = ("realtime", "stream", "photo", "pro")
NAMES = (*VARIANTS, *TIERS)
# Of residual branches; before training they are so small that no error could be seen. The deepest
# one has 36 of them, which at a half would make pixels of 85.
_SHARE, _SHARES = 0.5, {"pro": 0.2}
# What is run once before anything is measured, a side in pixels.
_TINY = 64

# An attention, and the budget in bytes if the network is streamed, else 0.
Way = tuple[str, int]


def attentions(name: str) -> tuple[str, ...]:
    """With attention in windows and without; two of the public ones never have any."""
    return ("none",) if name in ("realtime", "stream") else ("window", "none")


def config_of(name: str, scale: int, attention: str) -> VariantConfig | TierConfig:
    """The shape of a variant or a public tier."""
    if name in VARIANTS:
        return VariantConfig.of(name, scale, attention=attention)
    tier = TIERS[[*TIERS].index(name)]
    return replace(TierConfig.of(tier, scale), attention=attention != "none")


def network(name: str, scale: int, attention: str) -> nn.Module:
    """The network with random weights, the same each time, on the device that is the default."""
    torch.manual_seed(0)
    config = config_of(name, scale, attention)
    if isinstance(config, TierConfig):
        made: nn.Module = ParagonTier(config)
    else:
        made = ParagonVariant(config)
    with torch.no_grad():
        for key, weight in made.named_parameters():
            if key.endswith("gamma"):
                weight.fill_(_SHARES.get(name, _SHARE))
    return made.eval()


def image_of(side: int) -> Tensor:
    """A square image of noise, (1, 3, side, side) in 0..1."""
    return torch.rand(1, 3, side, side, generator=torch.Generator().manual_seed(1))


def _prepared(name: str, scale: int, side: int, way: Way) -> nn.Module:
    """The network as one way runs it, after what is done only once."""
    attention, budget = way
    module = network(name, scale, attention)
    if not budget:
        module(image_of(min(side, _TINY)))
        return module
    streamed = Streamed(module, budget=budget)
    streamed.prepare(image_of(side))
    return streamed


_ready: dict[tuple[Any, ...], nn.Module] = {}


def run_once(name: str, scale: int, side: int, way: Way) -> None:
    """One run; the first call, which is not measured, makes the network and its plan."""
    key = (name, scale, side, *way)
    with torch.no_grad():
        if key in _ready:
            _ready[key](image_of(side))
        else:
            _ready[key] = _prepared(name, scale, side, way)


def run_times(
    name: str, scale: int, side: int, ways: dict[str, Way], pairs: int, compared: bool
) -> dict[str, Any]:
    """Processor seconds of each way, in turns; the first of several rounds warms up. With
    ``compared`` also how far the last way's result is from the first one's."""
    image, results = image_of(side), list[Tensor]()
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    found: dict[str, Any] = {"cpu_s": seconds, "threads": torch.get_num_threads()}
    with torch.no_grad():
        runs = {title: _prepared(name, scale, side, way) for title, way in ways.items()}
        for number, way in in_turns(runs, pairs + (pairs > 1)):
            started = time.process_time()
            result = runs[way](image)
            taken = time.process_time() - started
            if number or pairs == 1:
                seconds[way].append(round(taken, 4))
            if compared and not number:
                results.append(result)
            del result
            if len(results) == len(runs):
                found |= difference(results[-1], results[0])
                results.clear()
    found["plans"] = [run.explain(image) for run in runs.values() if isinstance(run, Streamed)]
    return found


def difference(result: Tensor, whole: Tensor) -> dict[str, float]:
    """The largest difference, and the range that it is a part of."""
    return {
        "max_abs_error": (result - whole).abs().max().item(),
        "range": (whole.max() - whole.min()).item(),
    }


def save(name: str, scale: int, path: Path) -> Path:
    """The network of a variant as a model file."""
    from safetensors.torch import save_file

    config = config_of(name, scale, "window")
    assert isinstance(config, VariantConfig)
    made = network(name, scale, "window")
    save_file(dict(made.state_dict()), path, lowtide_files.metadata_for(config))
    return path


_STREAMED: dict[str, Any] = {"strategy": "streamed", "device": "cpu"}


def plan(weights: str, source: str, target: str, budget: str) -> None:
    """Learn what the network costs, which is remembered."""
    tune_heap()  # as the command line does
    import lowtide

    lowtide.plan(source, target, model=weights, budget=budget, force=True, **_STREAMED)


def upscale(weights: str, source: str, target: str, budget: str) -> dict[str, Any]:
    """A picture streamed by the job, and what its report says of memory."""
    tune_heap()
    import lowtide

    report = lowtide.upscale(source, target, model=weights, budget=budget, force=True, **_STREAMED)
    report.raise_for_failures()
    (one,) = report.images
    assert one.memory is not None and one.plan is not None and one.accuracy is not None
    return {
        **one.memory.model_dump(
            include={
                "budget_bytes",
                "predicted_bytes",
                "upper_bytes",
                "peak_bytes",
                "high_water_bytes",
                "within_budget",
            }
        ),
        "plan": one.plan.title,
        "accuracy": one.accuracy.execution,
        "cpu_s": round(one.cpu_seconds, 2),
        "threads": torch.get_num_threads(),
    }
