"""Autoencoders of diffusers that encode and decode within a budget, exactly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import nn

from lowtide.core.errors import UsageError
from lowtide.integrations.fitted_module import FitSettings, fit_part, is_fitted, unfit_part
from lowtide.integrations.part_selection import PARTS, check_part, chosen_parts, has_parts
from lowtide.memory.budget import Budget
from lowtide.streaming.pages.placement import PagePlacement

# On an autoencoder: which of its own ways to save memory `fit` switched off.
_SWITCHED_OFF = "_lowtide_switched_off"


def fit(
    autoencoder: nn.Module,
    *,
    budget: str | int | Budget = "auto",
    pages: PagePlacement = "auto",
    scratch: Path | None = None,
    parts: Sequence[str] | None = None,
) -> nn.Module:
    """Make a diffusers autoencoder for images encode and decode by bands, in place.

        lowtide.fit(pipe.vae, budget="2GiB")
        image = pipe("a lighthouse").images[0]      # the same image, in less memory
        lowtide.unfit(pipe.vae)

    Takes `AutoencoderKL`, `AutoencoderTiny`, `AutoencoderDC` and whatever else has an ``encoder``
    and a ``decoder`` that turn one (B, C, H, W) tensor into another. Results equal those of the
    untouched module to rounding, so its own tiling and slicing, which this replaces, are switched
    off until `unfit`. ``budget``, ``pages`` and ``scratch`` count as they do for `lowtide.stream`.
    ``parts``, of ``"encoder"`` and ``"decoder"``, names what is fitted where not all of it can be;
    then tiling and slicing are left as they are. Returns ``autoencoder``.

    Copies (`copy.deepcopy`, pickle, replicas) are fitted too, each with weights of its own.

    Raises `UsageError`, with nothing changed, for a module that is fitted already, is compiled or
    hooked by offloading, or has a part that cannot be run so: of video, of sound, or with more
    inputs than an image. A call raises it that wants gradients or is in training mode.
    """
    module = _unwrapped(autoencoder)
    chosen = chosen_parts(module, parts)
    _check(module, chosen, or_fewer=parts is None)
    whole = all(getattr(module, name, None) is None or name in chosen for name in PARTS)
    for part in chosen.values():
        fit_part(part, FitSettings(budget, pages, scratch))
    if whole:
        vars(module)[_SWITCHED_OFF] = tuple(_switch_off(module))
    return autoencoder


def unfit(autoencoder: nn.Module) -> nn.Module:
    """Undo `fit`: the module computes as it did before, to the bit.

    Hooks and compiled calls that came after `fit` stay; tiling and slicing that were on before it
    are on again. Returns ``autoencoder``, also if nothing of it is fitted.
    """
    module = _unwrapped(autoencoder)
    for part in module.modules():
        if is_fitted(part):
            unfit_part(part)
    for name in vars(module).pop(_SWITCHED_OFF, ()):
        getattr(module, f"enable_{name}")()
    return autoencoder


def _check(autoencoder: nn.Module, chosen: dict[str, nn.Module], *, or_fewer: bool) -> None:
    """Raise `UsageError` for the first part that cannot be fitted, naming those that can."""
    refusals: dict[str, UsageError] = {}
    for name, part in chosen.items():
        try:
            check_part(f"the {name} of this {type(autoencoder).__name__}", part)
        except UsageError as refusal:
            refusals[name] = refusal
    for refusal in refusals.values():
        rest = tuple(name for name in chosen if name not in refusals)
        if or_fewer and rest and refusal.hint is None:
            refusal.hint = f"lowtide.fit(module, parts={rest!r}) leaves it as it is"
        raise refusal


def _switch_off(autoencoder: nn.Module) -> Iterator[str]:
    """Switch tiling and slicing off; the names of those that were on."""
    for name in ("tiling", "slicing"):
        if not callable(switch := getattr(autoencoder, f"disable_{name}", None)):
            continue
        if getattr(autoencoder, f"use_{name}", False):
            yield name
        switch()


def _unwrapped(autoencoder: object) -> nn.Module:
    """The module itself, of one that `torch.compile` gave; a pipeline is told what to pass."""
    if isinstance(autoencoder, nn.Module):
        inner = getattr(autoencoder, "_orig_mod", autoencoder)
        return inner if isinstance(inner, nn.Module) else autoencoder
    inside = [
        name
        for name, value in getattr(autoencoder, "__dict__", {}).items()
        if isinstance(value, nn.Module) and has_parts(value)
    ]
    raise UsageError(
        f"a {type(autoencoder).__name__} is no autoencoder",
        hint=" or ".join(f"pass its .{name}" for name in inside) or None,
    )
