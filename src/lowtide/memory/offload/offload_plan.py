"""Offload plan: which weights stay resident, which stream, in how many buffers."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from pydantic import BaseModel, ConfigDict
from torch import nn

from lowtide.core.errors import BudgetError
from lowtide.core.units import MIB, format_bytes
from lowtide.memory.offload.weight_blocks import WeightBlock, find_blocks

# Block sizes to try, as fractions 1/n of all weights; 0 is every module by itself.
_BLOCK_FRACTIONS = (8, 16, 32, 64, 0)
# The overhead of starting a load, as the bytes that could be loaded in that time. A prior.
_LOAD_OVERHEAD = MIB
# Multiples of this, modulo 1, spread blocks evenly over a list of any length.
_GOLDEN_RATIO = 0.618033988749895


class OffloadPlan(BaseModel):
    """Blocks that stay resident and blocks streamed through ``in_flight`` buffers.

    Serializes to JSON. All sizes are bytes. ``activation_bytes`` is what the caller reserved of
    ``budget_bytes``.
    """

    model_config = ConfigDict(frozen=True)

    resident: tuple[WeightBlock, ...]
    streamed: tuple[WeightBlock, ...]
    in_flight: int
    budget_bytes: int
    activation_bytes: int = 0

    @property
    def resident_bytes(self) -> int:
        """Bytes of weights that stay in memory."""
        return sum(block.nbytes for block in self.resident)

    @property
    def streamed_bytes(self) -> int:
        """Bytes of weights loaded again on every pass through the model."""
        return sum(block.nbytes for block in self.streamed)

    @property
    def largest_streamed_bytes(self) -> int:
        """Bytes of one buffer."""
        return max((block.nbytes for block in self.streamed), default=0)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of all buffers."""
        return self.in_flight * self.largest_streamed_bytes

    @property
    def peak_bytes(self) -> int:
        """Bytes of resident weights, buffers and activations together."""
        return self.resident_bytes + self.buffer_bytes + self.activation_bytes


def plan_offload(
    model: nn.Module, budget_bytes: int, *, activation_bytes: int = 0, resident: Iterable[str] = ()
) -> OffloadPlan:
    """Choose which weights of ``model`` stay resident and which stream, by a budget.

    As much stays resident as fits with two buffers of the largest streamed block, one for the block
    that runs and one to prefetch the next; where only one buffer fits, blocks are loaded when they
    are needed. Layers are split only if whole ones do not fit.

    Args:
        model: may be on the meta device; only names, shapes and dtypes are read.
        budget_bytes: for weights, buffers and activations together.
        activation_bytes: part of the budget reserved for everything that is not a weight.
        resident: names of modules, parameters and buffers that must not be streamed.

    Raises:
        BudgetError: if one block, what cannot be streamed, and the activations do not fit together;
            names the smallest budget that would do.
        UsageError: for a name in ``resident`` that the model does not have.
    """
    names, available = tuple(resident), budget_bytes - activation_bytes
    budgets = dict(budget_bytes=budget_bytes, activation_bytes=activation_bytes)
    everything = find_blocks(model, resident=names)
    total = sum(block.nbytes for block in everything)
    if total <= available:
        return OffloadPlan(resident=tuple(everything), streamed=(), in_flight=0, **budgets)

    @functools.cache
    def splits(layers: bool) -> list[list[WeightBlock]]:
        sizes = [total // share if share else 0 for share in _BLOCK_FRACTIONS]
        return [
            find_blocks(model, largest_bytes=size, split_layers=layers, resident=names)
            for size in sizes
        ]

    for in_flight in (2, 1):
        for layers in (False, True):
            fits = [fit for blocks in splits(layers) if (fit := _fit(blocks, available, in_flight))]
            if fits:
                resident_blocks, streamed_blocks = min(fits, key=_cost)
                return OffloadPlan(
                    resident=tuple(resident_blocks),
                    streamed=tuple(streamed_blocks),
                    in_flight=min(in_flight, len(streamed_blocks)),
                    **budgets,
                )
    needs = [_min_bytes(blocks) for layers in (False, True) for blocks in splits(layers)]
    raise _budget_error(min(needs), budget_bytes, activation_bytes)


_Fit = tuple[list[WeightBlock], list[WeightBlock]]


def _cost(fit: _Fit) -> int:
    return sum(block.nbytes + _LOAD_OVERHEAD for block in fit[1])


def _fit(blocks: Sequence[WeightBlock], available: int, in_flight: int) -> _Fit | None:
    """Return the (resident, streamed) blocks that fit in ``available`` and load least."""
    best: _Fit | None = None
    free = [block for block in blocks if block.modules]
    for limit in sorted({block.nbytes for block in free}):
        passing = [block for block in free if block.nbytes <= limit]
        spare = available - min(in_flight, len(passing)) * limit
        spare -= sum(b.nbytes for b in blocks if not b.modules or b.nbytes > limit)
        if spare < 0:
            continue
        # Small blocks stay resident first: they cost as many loads as large ones. The others are
        # spread out, so that a block can be loaded while resident ones are computed.
        spread = {block.name: index * _GOLDEN_RATIO % 1 for index, block in enumerate(passing)}
        passing.sort(key=lambda block: (8 * block.nbytes > limit, spread[block.name]))
        streamed: set[str] = set()
        for block in passing:
            if block.nbytes <= spare:
                spare -= block.nbytes
            else:
                streamed.add(block.name)
        fit = (
            [b for b in blocks if b.name not in streamed],
            [b for b in blocks if b.name in streamed],
        )
        best = fit if best is None else min(best, fit, key=_cost)
    return best


def _min_bytes(blocks: Sequence[WeightBlock]) -> tuple[int, int, str]:
    """Return (least weight bytes, bytes of the largest streamed block, its name)."""
    total = sum(block.nbytes for block in blocks)
    options = [(total, 0, "")]
    for largest in blocks:
        if largest.modules:
            smaller = (b for b in blocks if b.modules and b.nbytes <= largest.nbytes)
            resident = total - sum(block.nbytes for block in smaller)
            options.append((resident + largest.nbytes, largest.nbytes, largest.name))
    return min(options)


def _budget_error(need: tuple[int, int, str], budget: int, activations: int) -> BudgetError:
    weights, largest, name = need
    smallest = weights + activations
    return BudgetError(
        f"the model cannot be streamed within {format_bytes(budget)}: it needs"
        f" {format_bytes(smallest)}, {format_bytes(largest)} for the block {name!r},"
        f" {format_bytes(weights - largest)} for resident weights and"
        f" {format_bytes(activations)} for activations",
        smallest=smallest,
        hint=f"a budget of {-(-smallest // MIB)}MiB",
    )
