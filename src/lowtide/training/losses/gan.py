"""Adversarial losses, of a discriminator's logits: high for real pictures, low for made ones.

Logits have any shape, one for each picture or a map of them; what comes out is their mean, a
scalar. The kinds, with R logits of real pictures and F of fake ones:

    kind      discriminator                         generator
    vanilla   softplus(-R) + softplus(F)            softplus(-F)       arXiv 1406.2661
    lsgan     (R - 1)**2 + F**2                     (F - 1)**2         arXiv 1611.04076
    hinge     relu(1 - R) + relu(1 + F)             -F                 arXiv 1705.02894
    r3gan     softplus(F - R)                       softplus(R - F)    arXiv 2501.05441

vanilla is the logistic loss in its non-saturating form. lsgan has no halves, unlike its paper, as
is usual in super-resolution. r3gan pairs each real picture with the fake one in the same place;
its discriminator also needs gamma / 2 * (R1 + R2), of `gradient_penalty` on real and on fake
pictures, whose gamma is the caller's.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.core.errors import UsageError
from lowtide.core.suggest import hint_for_name
from lowtide.training.losses.pixel import full_precision

GanKind = Literal["vanilla", "lsgan", "hinge", "r3gan"]


def generator_loss(kind: str, fake: Tensor, real: Tensor | None = None) -> Tensor:
    """What the generator is to lower, for a `GanKind`; formulas are in the module.

    ``fake`` and ``real`` are logits of the same shape; only r3gan looks at ``real``, and gives it
    no gradient. Raises UsageError for an unknown kind, and for an r3gan whose ``real`` is missing
    or of another shape.
    """
    _require_kind(kind)
    fake = full_precision(fake)
    if kind == "r3gan":
        if real is None:
            raise UsageError("the r3gan generator loss needs the logits of real pictures too")
        _require_pairs(real, fake)
        # They do not depend on the generator, and the discriminator is not to learn from this.
        return F.softplus(full_precision(real.detach()) - fake).mean()
    if kind == "hinge":
        return -fake.mean()
    if kind == "lsgan":
        return (fake - 1).square().mean()
    return F.softplus(-fake).mean()


def discriminator_loss(kind: str, real: Tensor, fake: Tensor) -> Tensor:
    """What the discriminator is to lower, for a `GanKind`; formulas are in the module.

    ``real`` and ``fake`` are logits; ``fake`` should be those of detached pictures. Raises
    UsageError for an unknown kind, and for r3gan's logits of different shapes.
    """
    _require_kind(kind)
    real, fake = full_precision(real), full_precision(fake)
    if kind == "r3gan":
        _require_pairs(real, fake)
        return F.softplus(fake - real).mean()
    if kind == "hinge":
        return F.relu(1 - real).mean() + F.relu(1 + fake).mean()
    if kind == "lsgan":
        return (real - 1).square().mean() + fake.square().mean()
    return F.softplus(-real).mean() + F.softplus(fake).mean()


def gradient_penalty(logits: Tensor, picture: Tensor) -> Tensor:
    """Mean over the batch of the squared norm of the logits' gradient in the picture.

    R1 of real pictures, R2 of fake ones (arXiv 1801.04406). ``picture`` is (B, ...), requires a
    gradient, and is what ``logits`` (B, ...) were computed from, by a discriminator that does not
    mix the pictures of a batch. The result can be differentiated once more. A picture's logits are
    summed, so that of a map the penalty grows with its size; give their mean over the map where it
    should not. Raises UsageError where ``picture`` has no gradient, or ``logits`` none from it.
    """
    if not picture.requires_grad:
        raise UsageError(
            f"the gradient penalty's picture {tuple(picture.shape)} does not require a gradient",
            hint="call picture.requires_grad_() before the discriminator",
        )
    gradient = None
    if logits.requires_grad:
        (gradient,) = torch.autograd.grad(
            full_precision(logits).sum(), picture, create_graph=True, allow_unused=True
        )
    if gradient is None:
        raise UsageError(
            f"logits {tuple(logits.shape)} do not depend on the picture {tuple(picture.shape)}",
            hint="give the very tensor that the discriminator was given, with gradients enabled",
        )
    return full_precision(gradient).flatten(1).square().sum(1).mean()


def _require_kind(kind: str) -> None:
    """UsageError for a kind there is not, as a settings file may have one."""
    known = get_args(GanKind)
    if kind not in known:
        raise UsageError(
            f"there is no adversarial loss {kind!r}; there are: {', '.join(known)}",
            hint=hint_for_name(kind, known),
        )


def _require_pairs(real: Tensor, fake: Tensor) -> None:
    """Broadcasting would pair each picture with all the others."""
    if real.shape != fake.shape:
        raise UsageError(
            f"r3gan pairs logits of the same shape, not real {tuple(real.shape)} and "
            f"fake {tuple(fake.shape)}"
        )
