"""Small window transformers of spandrel's, with random weights."""

import importlib

import torch

SWIN = {
    "upscale": 2,
    "img_size": 32,
    "depths": [2, 2],
    "num_heads": [2, 2],
    "embed_dim": 36,
    "mlp_ratio": 2,
    "img_range": 1.0,
    "upsampler": "pixelshuffle",
    "resi_connection": "1conv",
}
MORE = {
    "SwinIR": {"window_size": 8},
    "DRCT": {"window_size": 8, "gc": 12},
    "HAT": {
        "window_size": 8,
        "compress_ratio": 3,
        "squeeze_factor": 6,
        "conv_scale": 0.01,
        "overlap_ratio": 0.5,
    },
    "CRAFT": {},
}
HOMES = {"SwinIR": "SwinIR", "DRCT": "drct_arch", "HAT": "HAT", "CRAFT": "CRAFT"}


def network(family, **other):
    """A model whose biases, norms and tables are not what they begin as."""
    torch.manual_seed(0)
    home = importlib.import_module(f"spandrel.architectures.{family}.__arch.{HOMES[family]}")
    options = (
        {"embed_dim": 32, "depths": [1, 1], "num_heads": [4, 4]}
        if family == "CRAFT"
        else (SWIN | MORE[family] | other)
    )
    made = getattr(home, family)(**options).eval().requires_grad_(False)
    for weight in made.parameters():
        if weight.dim() == 1:
            weight.add_(torch.randn(weight.shape) * 0.1)
        elif weight.shape[-1] == 2:
            weight.normal_()  # tables of biases, which are nearly 0 at first
    return made
