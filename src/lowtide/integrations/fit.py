"""Autoencoders of diffusers that encode and decode within a budget, exactly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lowtide.core.errors import UsageError
from lowtide.memory.budget import Budget
from lowtide.streaming.bands.placement import Wanted
from lowtide.streaming.bands.streamed import Streamed

_PARTS = ("encoder", "decoder")


class _Part(nn.Module):
    """A module as its class defines it, whatever was put in front of its forward."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, image: Tensor) -> Tensor:
        """(B, C, H, W) to (B, C', H', W')."""
        return type(self.module).forward(self.module, image)


def fit(
    autoencoder: nn.Module, *, budget: str | int | Budget = "auto",
    pages: Wanted = "auto", scratch: Path | None = None,
) -> nn.Module:  # fmt: skip
    """Make a diffusers autoencoder for images encode and decode by bands, in place.

        lowtide.fit(pipe.vae, budget="2GiB")
        image = pipe("a lighthouse").images[0]      # the same image, in less memory
        lowtide.unfit(pipe.vae)

    Takes `AutoencoderKL`, `AutoencoderTiny` and whatever else has an ``encoder`` and a ``decoder``
    that turn one (B, C, H, W) tensor into another. Results equal those of the untouched module to
    rounding, so its own tiling and slicing, which this replaces, are switched off. ``budget``
    counts as it does for `lowtide.stream`. Returns ``autoencoder``. Raises `UsageError` for a
    module that has no such parts or is fitted already.
    """
    parts = list(_parts(autoencoder))
    if not parts:
        raise UsageError(f"{type(autoencoder).__name__} has no encoder or decoder to be streamed")
    if any("forward" in vars(part) for part in parts):
        raise UsageError(
            f"this {type(autoencoder).__name__} is fitted already, or its forward is replaced",
            hint="lowtide.unfit(module) first",
        )
    for name in ("disable_tiling", "disable_slicing"):
        if callable(switch := getattr(autoencoder, name, None)):
            switch()
    for part in parts:
        part.forward = _forward(part, Streamed(
            _Part(part).eval(), budget=budget, pages=pages, scratch=scratch
        ))  # fmt: skip
    return autoencoder


def unfit(autoencoder: nn.Module) -> nn.Module:
    """Undo `fit`: the module computes as it did before, to the bit."""
    for part in _parts(autoencoder):
        vars(part).pop("forward", None)
    return autoencoder


def _forward(part: nn.Module, streamed: Streamed) -> Any:
    def forward(sample: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if any(value is not None for value in (*args, *kwargs.values())):
            raise UsageError(f"a streamed {type(part).__name__} takes a single tensor")
        return streamed(sample)

    return forward


def _parts(autoencoder: nn.Module) -> Iterator[nn.Module]:
    for name in _PARTS:
        part = getattr(autoencoder, name, None)
        if isinstance(part, nn.Module):
            yield part
