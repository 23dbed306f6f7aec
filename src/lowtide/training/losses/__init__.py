"""Loss functions of super-resolution training.

`pixel`, `structure` and `perceptual` compare a prediction with its target, both (B, 3, H, W) and
nominally in 0..1; `make_loss` builds them by name. `gan` works on the logits of a discriminator.
All return a scalar in fp32, or in fp64 where the images are in fp64.
"""

from lowtide.training.losses.gan import (
    GanKind,
    discriminator_loss,
    generator_loss,
    gradient_penalty,
)
from lowtide.training.losses.loss_factory import LossName, loss_names, make_loss
from lowtide.training.losses.perceptual import PerceptualLoss
from lowtide.training.losses.pixel import CharbonnierLoss, FFTLoss, L1Loss, MSELoss
from lowtide.training.losses.structure import MSSSIMLoss

__all__ = [
    "CharbonnierLoss",
    "FFTLoss",
    "GanKind",
    "L1Loss",
    "LossName",
    "MSELoss",
    "MSSSIMLoss",
    "PerceptualLoss",
    "discriminator_loss",
    "generator_loss",
    "gradient_penalty",
    "loss_names",
    "make_loss",
]
