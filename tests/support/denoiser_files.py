"""Small denoisers with random weights, as modules and as files."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from lowtide.core import heap
from lowtide.jobs.images.model_costs import store_costs
from lowtide.models.denoiser.config import SlimUNetConfig
from lowtide.models.denoiser.denoiser import Denoiser
from lowtide.models.lowtide_files import metadata_for
from lowtide.models.model_files import sha256_of
from support.measured_costs import costs_of


def small_denoiser(seed: int = 0, **options) -> Denoiser:
    """A denoiser all of whose layers do something, in eval mode without gradients."""
    given = {"features": 8, "multipliers": (1, 2), "groups": 4, "embedding": 16, **options}
    torch.manual_seed(seed)
    made = Denoiser(SlimUNetConfig(**given)).eval().requires_grad_(False)
    for parameter in made.parameters():
        if not parameter.any():
            parameter.normal_(std=0.1)
    return made


def denoiser_file(path: Path, **options) -> Path:
    """Save a small denoiser, and remember costs for it: it looks at the image as a whole."""
    made = small_denoiser(**options)
    save_file(made.state_dict(), path, metadata_for(made.config))
    sha256, before = sha256_of(path), heap._tuned
    changes = {"sha256": sha256, "receptive_field": None, "channels_last": False}
    costs = costs_of("lowtide-x2").model_copy(update=changes)
    for heap._tuned in (False, True):  # commands tune it
        store_costs(costs, sha256)
    heap._tuned = before
    return path
