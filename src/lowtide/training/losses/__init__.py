"""Loss functions of super-resolution training.

`pixel` and `perceptual` compare a prediction with its target, both (B, 3, H, W) and nominally in
0..1; `make_loss` builds them by their names in configuration files. `gan` works on the logits of a
discriminator. All return a scalar in fp32, or in fp64 where the images are in fp64.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from lowtide.core.errors import UsageError, hint_for_name
from lowtide.training.losses.perceptual import PerceptualLoss
from lowtide.training.losses.pixel import (
    CharbonnierLoss,
    FFTLoss,
    L1Loss,
    MSELoss,
    MSSSIMLoss,
)

_LOSSES: dict[str, type[nn.Module]] = {
    "l1": L1Loss,
    "charbonnier": CharbonnierLoss,
    "mse": MSELoss,
    "msssim": MSSSIMLoss,
    "fft": FFTLoss,
    "perceptual": PerceptualLoss,
}


def make_loss(type: str, **options: Any) -> nn.Module:
    """Build the loss module of a name.

    The module takes (prediction, target), both (B, 3, H, W). Case, hyphens, underscores and "loss"
    at the end do not matter: "MS-SSIM", "msssim_loss" and "MSSSIMLoss" are the same. ``options``
    are arguments of the class. Raises UsageError for an unknown name or option, a missing option,
    and values that the class refuses.
    """
    loss = _loss_class(type)
    parameters = inspect.signature(loss).parameters if "__init__" in vars(loss) else {}
    for option in options:
        if option not in parameters:
            raise UsageError(
                f"{loss.__name__} has no option {option!r}; it has: "
                f"{', '.join(parameters) or 'none'}",
                hint=hint_for_name(option, parameters) if parameters else f"remove {option!r}",
            )
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in options:
            raise UsageError(f"{loss.__name__} needs the option {name!r}")
    return loss(**options)


def _loss_class(name: str) -> type[nn.Module]:
    """Return the class of a name in any spelling; UsageError for an unknown one."""
    plain = name.lower().replace("-", "").replace("_", "").removesuffix("loss")
    if plain not in _LOSSES:
        raise UsageError(
            f"unknown loss {name!r}; choose from: {', '.join(_LOSSES)}",
            hint=hint_for_name(plain, _LOSSES),
        )
    return _LOSSES[plain]
