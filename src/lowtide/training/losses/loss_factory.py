"""Losses by the names that settings files have for them."""

from __future__ import annotations

import inspect
from typing import Any, Literal, get_args

from torch import nn

from lowtide.core.errors import UsageError
from lowtide.core.suggest import hint_for_name
from lowtide.training.losses.frequency import FFTLoss
from lowtide.training.losses.perceptual import PerceptualLoss
from lowtide.training.losses.pixel import CharbonnierLoss, L1Loss, MSELoss
from lowtide.training.losses.structure import MSSSIMLoss

LossName = Literal["l1", "charbonnier", "mse", "msssim", "fft", "perceptual"]

_LOSSES: dict[LossName, type[nn.Module]] = {
    "l1": L1Loss,
    "charbonnier": CharbonnierLoss,
    "mse": MSELoss,
    "msssim": MSSSIMLoss,
    "fft": FFTLoss,
    "perceptual": PerceptualLoss,
}


def loss_names() -> tuple[LossName, ...]:
    """The names `make_loss` knows, in their shortest form."""
    return get_args(LossName)


def make_loss(type: str, **options: Any) -> nn.Module:
    """The loss of that name: a module that takes (prediction, target), both (B, 3, H, W).

    Case, hyphens, underscores and "loss" at the end do not matter: "MS-SSIM", "msssim_loss" and
    "MSSSIMLoss" are the same. ``options`` are those of the class. Raises UsageError for a name or
    an option there is not, an option that is missing, and what the class refuses.
    """
    loss = _loss(type)
    parameters = inspect.signature(loss).parameters if "__init__" in vars(loss) else {}
    for option in options:
        if option not in parameters:
            raise UsageError(
                f"{loss.__name__} has no option {option!r}; it has: "
                f"{', '.join(parameters) or 'none'}",
                hint=hint_for_name(option, parameters) if parameters else f"leave {option!r} out",
            )
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in options:
            raise UsageError(f"{loss.__name__} needs the option {name!r}")
    return loss(**options)


def _loss(name: str) -> type[nn.Module]:
    """The class of a name in any spelling; UsageError with the nearest one for an unknown."""
    plain = name.lower().replace("-", "").replace("_", "").removesuffix("loss")
    for known, loss in _LOSSES.items():
        if plain == known:
            return loss
    raise UsageError(
        f"there is no loss {name!r}; there are: {', '.join(loss_names())}",
        hint=hint_for_name(plain, loss_names()),
    )
