"""`fit` and `unfit`: diffusers autoencoders in bands within a memory budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from torch import nn

from lowtide.core.errors import UsageError
from lowtide.integrations.fitted_module import FitSettings, fit_part, is_fitted, unfit_part
from lowtide.integrations.part_selection import (
    PARTS,
    looks_like_autoencoder,
    parts_to_fit,
    require_fittable_part,
    require_fittable_video_autoencoder,
)
from lowtide.integrations.video_autoencoders.families import class_names, family_of, refusal_of
from lowtide.memory.budget import Budget
from lowtide.streaming.engine.placement import PagePlacement

# Attribute of an autoencoder: its own memory savings (tiling, slicing) that `fit` switched off.
_SWITCHED_OFF = "_lowtide_switched_off"


def fit(
    autoencoder: nn.Module,
    *,
    budget: str | int | Budget = "auto",
    pages: PagePlacement = "auto",
    scratch: Path | None = None,
    parts: Sequence[str] | None = None,
) -> nn.Module:
    """Make a diffusers autoencoder encode and decode in bands, in place.

        lowtide.fit(pipe.vae, budget="2GiB")
        image = pipe("a lighthouse").images[0]      # the same image, in less memory
        lowtide.unfit(pipe.vae)

    Takes `AutoencoderKL`, `AutoencoderTiny`, `AutoencoderDC` and any module with an ``encoder`` and
    a ``decoder`` that map one (B, C, H, W) tensor to another. Results equal those of the original
    module to rounding, so its own tiling and slicing, which this replaces, are switched off until
    `unfit`; tiling that is switched on again afterwards gives tiled results, each tile in bands.
    A call that fits the budget runs as it is, equal bit for bit: bands are planned where it does
    not. Copies (`copy.deepcopy`, pickle, replicas) are fitted too, each with its own
    weights.

    Of video autoencoders it takes `AutoencoderKLWan` (2.1 and 2.2),
    `AutoencoderKLQwenImage`, `AutoencoderKLMagvit`, `AutoencoderKLCogVideoX` and Lowtide's own
    `VideoVAE`. They run the chunks of frames that they run by themselves, each in bands, and never
    in tiles.

    Args:
        autoencoder: The module, changed in place.
        budget: As for `lowtide.stream`.
        pages: As for `lowtide.stream`. All but ``"auto"`` runs every call in bands.
        scratch: As for `lowtide.stream`.
        parts: What to fit where not all of it can be: ``"encoder"``, ``"decoder"`` or both. Tiling
            and slicing are then left as they are.

    Returns:
        ``autoencoder``.

    Raises:
        UsageError: The module is fitted already, is compiled, has offloading hooks, or has a part
            that cannot run in bands: of other video, of audio, or with more inputs than an image.
            Nothing is changed then. Later calls raise it if they need gradients or are in training
            mode.

    Warns:
        UserWarning: As `lowtide.stream`, at the first call in bands; and at a call of an image
            autoencoder whose tiling was switched on after it was fitted.
    """
    module, settings = _unwrapped(autoencoder), FitSettings(budget, pages, scratch)
    if (reason := refusal_of(type(module))) is not None:
        raise UsageError(
            f"this {type(module).__name__} cannot run in bands of a clip: {reason}",
            hint=f"lowtide.fit takes {', '.join(class_names())}",
        )
    family = family_of(type(module))
    chosen = parts_to_fit(module, parts)
    whole = all(getattr(module, name, None) is None or name in chosen for name in PARTS)
    if family:
        require_fittable_video_autoencoder(module, family, tuple(chosen))
        fit_part(module, replace(settings, parts=tuple(chosen)))
    else:
        _check_parts(module, chosen, suggest_parts=parts is None)
        for part in chosen.values():
            fit_part(part, settings, module if whole else None)
    if whole:
        vars(module)[_SWITCHED_OFF] = tuple(_switch_off(module))
    return autoencoder


def unfit(autoencoder: nn.Module) -> nn.Module:
    """Undo `fit`: the module's results are bit for bit those before it.

    Hooks and compiled calls added after `fit` stay; tiling and slicing that were on before it are
    on again. Returns ``autoencoder``, even if no part of it is fitted.
    """
    module = _unwrapped(autoencoder)
    for part in module.modules():
        if is_fitted(part):
            unfit_part(part)
    for name in vars(module).pop(_SWITCHED_OFF, ()):
        getattr(module, f"enable_{name}")()
    return autoencoder


def _check_parts(
    autoencoder: nn.Module, chosen: dict[str, nn.Module], *, suggest_parts: bool
) -> None:
    """Raise `UsageError` for the first part that cannot be fitted.

    The hint names those that can.
    """
    errors: dict[str, UsageError] = {}
    for name, part in chosen.items():
        try:
            require_fittable_part(f"the {name} of this {type(autoencoder).__name__}", part)
        except UsageError as refusal:
            errors[name] = refusal
    for refusal in errors.values():
        rest = tuple(name for name in chosen if name not in errors)
        if suggest_parts and rest and refusal.hint is None:
            refusal.hint = f"lowtide.fit(module, parts={rest!r}) leaves it as it is"
        raise refusal


def _switch_off(autoencoder: nn.Module) -> Iterator[str]:
    """Switch tiling and slicing off, and yield the names of those that were on."""
    for name in ("tiling", "slicing"):
        if not callable(switch := getattr(autoencoder, f"disable_{name}", None)):
            continue
        if getattr(autoencoder, f"use_{name}", False):
            yield name
        switch()


def _unwrapped(autoencoder: object) -> nn.Module:
    """Return the module itself, unwrapped from `torch.compile`.

    Raises `UsageError` for a pipeline, with a hint of what to pass.
    """
    if isinstance(autoencoder, nn.Module):
        inner = getattr(autoencoder, "_orig_mod", autoencoder)
        return inner if isinstance(inner, nn.Module) else autoencoder
    inside = [
        name
        for name, value in getattr(autoencoder, "__dict__", {}).items()
        if isinstance(value, nn.Module) and looks_like_autoencoder(value)
    ]
    raise UsageError(
        f"a {type(autoencoder).__name__} is not an autoencoder",
        hint=" or ".join(f"pass its .{name}" for name in inside) or None,
    )
