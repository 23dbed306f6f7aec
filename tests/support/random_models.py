"""Random models, by seed."""

import torch

from support.stream_families import AUTOENCODERS, FAMILIES, Part, rolled

# The bound of the project for fp32, as a share of the largest number.
BOUND = 2e-5


def made(name):
    """(module, channels of its input)"""
    torch.manual_seed(0)
    if name in FAMILIES:
        return rolled(FAMILIES[name]()).eval(), 3
    make, call, channels = AUTOENCODERS[name]
    return Part(rolled(make()), call).eval(), channels


def drawn_size(name, draw):
    """Odd sizes too, but where a model wants them even or its caller pads for it."""
    grain = 8 if name == "DRCT" else 4 if name in AUTOENCODERS else 1
    return tuple(draw.randint(20, 72) // grain * grain for _ in range(2))
