"""Loader of models by bundled name or file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lowtide.core.errors import ModelError
from lowtide.core.input_file import expand_home
from lowtide.models import lowtide_files, spandrel_files
from lowtide.models.description import describe_model
from lowtide.models.loaded_model import Model
from lowtide.models.model_files import is_onnx, sha256_of

if TYPE_CHECKING:
    import torch


def load(name_or_path: str | Path, *, device: str | torch.device = "cpu") -> Model:
    """Load a bundled model by name, or a model file.

    Files: .safetensors, .pth or .ckpt, in which nothing is run, and .onnx, which ONNX Runtime runs
    on the CPU. A safetensors file with Lowtide's metadata is built from that; every other one is
    recognized by the names of its tensors, as of Lowtide's families, of one of
    `lowtide.models.register_family`, or of spandrel's. The model comes in the dtype its weights are
    run in by default (fp32 for all known families), on ``device``.

    Raises:
        ModelError: the name is unknown or the file is missing, damaged, hostile, of an unknown kind
            or family, or no image-to-image model.
        UsageError: this machine does not have the device, or an ONNX file is not run on it.
    """
    facts = describe_model(name_or_path)
    if facts is not None:
        path = Path(facts.path or "")
        return Model(lowtide_files.load_network(path, lowtide_files.read_metadata(path)), facts).to(
            device
        )
    path = expand_home(Path(name_or_path), ModelError)
    digest = sha256_of(path)
    if is_onnx(path):
        from lowtide.models import onnx_model  # late: needs optional packages

        return onnx_model.load_onnx_model(path, path.stem, digest).to(device)
    module, facts = spandrel_files.load_spandrel(path, path.stem, digest)
    return Model(module, facts).to(device)
