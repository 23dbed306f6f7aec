"""Pointwise operators whose new rows are read together with held ones."""

import torch
import torch.nn.functional as F

from support.band_runs import Branches, check_parity

FUNCTIONS = {
    "add": lambda x: x + x.mean(1, keepdim=True),
    "sub": lambda x: x - x.mean(1, keepdim=True),
    "mul": lambda x: x * x.mean(1, keepdim=True),
    "div": lambda x: x / (2 + x.square().sum(1, True)),
    "silu": F.silu,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.3),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "hardtanh": F.hardtanh,
    "elu": F.elu,
    "hardswish": F.hardswish,
    "clamp": lambda x: x.clamp(-0.3, 0.4),
    "clamp_min": lambda x: x.clamp_min(0.1),
    "mish": F.mish,
}


def test_bands_give_what_the_module_gives():
    image = torch.rand(1, 3, 29, 13, dtype=torch.float64)
    check_parity(Branches(FUNCTIONS).double(), image)
