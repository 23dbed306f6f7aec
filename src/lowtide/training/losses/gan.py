"""Adversarial (GAN) losses and gradient penalty on the logits of a discriminator.

Logits are high for real images and low for fake ones. They have any shape, one per image or a
map; the loss is their mean, a scalar. The kinds, with R logits of real images and F of fake ones:

    kind      discriminator                         generator
    vanilla   softplus(-R) + softplus(F)            softplus(-F)       arXiv 1406.2661
    lsgan     (R - 1)**2 + F**2                     (F - 1)**2         arXiv 1611.04076
    hinge     relu(1 - R) + relu(1 + F)             -F                 arXiv 1705.02894
    r3gan     softplus(F - R)                       softplus(R - F)    arXiv 2501.05441

vanilla is the logistic loss in its non-saturating form. lsgan has no halves, unlike its paper, as
is usual in super-resolution. r3gan pairs each real image with the fake one at the same index;
its discriminator also needs gamma / 2 * (R1 + R2), where R1 and R2 are the `gradient_penalty` of
real and of fake images and the caller chooses gamma.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.core.errors import UsageError, hint_for_name
from lowtide.training.losses.pixel import to_full_precision

GanKind = Literal["vanilla", "lsgan", "hinge", "r3gan"]


def generator_loss(kind: str, fake: Tensor, real: Tensor | None = None) -> Tensor:
    """Return the generator's adversarial loss for a `GanKind`, a scalar.

    Formulas are in the module's docstring. ``fake`` and ``real`` are logits of the same shape, such
    as (B, 1, H, W). Only r3gan needs ``real``, which gets no gradient. Raises UsageError for an
    unknown kind, and for r3gan if ``real`` is missing or of another shape.
    """
    _require_kind(kind)
    fake = to_full_precision(fake)
    if kind == "r3gan":
        if real is None:
            raise UsageError("the r3gan generator loss needs the logits of real images too")
        _require_same_shape(real, fake)
        # Real logits do not depend on the generator, and this loss must not train the other side.
        return F.softplus(to_full_precision(real.detach()) - fake).mean()
    if kind == "hinge":
        return -fake.mean()
    if kind == "lsgan":
        return (fake - 1).square().mean()
    return F.softplus(-fake).mean()


def discriminator_loss(kind: str, real: Tensor, fake: Tensor) -> Tensor:
    """Return the discriminator's adversarial loss for a `GanKind`, a scalar.

    Formulas are in the module's docstring. ``real`` and ``fake`` are logits of any shape, such as
    (B, 1, H, W); ``fake`` should be those of detached images. Raises UsageError for an unknown
    kind, and for r3gan's logits of different shapes.
    """
    _require_kind(kind)
    real, fake = to_full_precision(real), to_full_precision(fake)
    if kind == "r3gan":
        _require_same_shape(real, fake)
        return F.softplus(fake - real).mean()
    if kind == "hinge":
        return F.relu(1 - real).mean() + F.relu(1 + fake).mean()
    if kind == "lsgan":
        return (real - 1).square().mean() + fake.square().mean()
    return F.softplus(-real).mean() + F.softplus(fake).mean()


def gradient_penalty(logits: Tensor, image: Tensor) -> Tensor:
    """Return the R1 or R2 gradient penalty: mean over B of the squared gradient norm.

    The gradient is that of the logits in the image. It is R1 for real images, R2 for fake ones
    (arXiv 1801.04406). The result can be differentiated once more.

    Args:
        logits: (B, ...), from a discriminator that does not mix the images of a batch. The logits
            of an image are summed, so that the penalty grows with the size of a map; pass the
            mean over the map to avoid that.
        image: (B, ...), the image that ``logits`` were computed from; requires a gradient.

    Raises:
        UsageError: If ``image`` does not require a gradient, or ``logits`` do not depend on it.
    """
    if not image.requires_grad:
        raise UsageError(
            f"the gradient penalty's image {tuple(image.shape)} does not require a gradient",
            hint="call requires_grad_() on it before the discriminator",
        )
    gradient = None
    if logits.requires_grad:
        (gradient,) = torch.autograd.grad(
            to_full_precision(logits).sum(), image, create_graph=True, allow_unused=True
        )
    if gradient is None:
        raise UsageError(
            f"logits {tuple(logits.shape)} do not depend on the image {tuple(image.shape)}",
            hint="pass the tensor that the discriminator received, with gradients enabled",
        )
    return to_full_precision(gradient).flatten(1).square().sum(1).mean()


def _require_kind(kind: str) -> None:
    """Raise UsageError for an unknown `GanKind`, as from a configuration file."""
    known = get_args(GanKind)
    if kind not in known:
        raise UsageError(
            f"unknown adversarial loss {kind!r}; choose from: {', '.join(known)}",
            hint=hint_for_name(kind, known),
        )


def _require_same_shape(real: Tensor, fake: Tensor) -> None:
    """Require equal shapes: broadcasting would pair each image with all the others."""
    if real.shape != fake.shape:
        raise UsageError(
            f"r3gan pairs logits of the same shape, not real {tuple(real.shape)} and "
            f"fake {tuple(fake.shape)}"
        )
