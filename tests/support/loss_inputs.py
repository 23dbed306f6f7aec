"""Inputs of losses, and gradients with respect to them."""

import torch


def pictures(*shape, noise=0.1, dtype=torch.float32):
    """A target with structure, in 0..1, and a prediction near it."""
    dice = torch.Generator().manual_seed(0)
    rows = torch.arange(shape[-2]).view(-1, 1) / 9
    columns = torch.arange(shape[-1]) / 5
    target = 0.5 + 0.2 * torch.sin(rows) * torch.cos(columns)
    target = target + 0.2 * torch.rand(shape, generator=dice)
    prediction = target + noise * (torch.rand(shape, generator=dice) - 0.5)
    return prediction.to(dtype), target.to(dtype)


def gradient_of(loss, prediction, target):
    prediction = prediction.clone().requires_grad_()
    value = loss(prediction, target)
    return value.detach(), torch.autograd.grad(value, prediction)[0]
