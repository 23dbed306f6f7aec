"""Model files of the upscaling world, through spandrel and, where it does not know them, our own.

spandrel recognizes about forty families by the names of their tensors and deduces their shapes.
Every use of it, its private names included, is in this file. Importing it takes a second or
two, hence never at the top of a module.
"""

from __future__ import annotations

import pickle
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lowtide.core.errors import ModelError
from lowtide.models.descriptor import ModelDescriptor, SizeRule, Tiling
from lowtide.models.fast.adapt import adapt
from lowtide.models.files import is_zip
from lowtide.models.fused import fold
from lowtide.models.paragonsr2 import tier_file

if TYPE_CHECKING:
    import spandrel

# Python's manual: unpickling damaged data may raise "AttributeError, EOFError, ImportError and
# IndexError, but not necessarily limited to". These are all that damage was seen to raise;
# MemoryError is among them because a changed length asks for terabytes.
_DAMAGE = (
    pickle.UnpicklingError, EOFError, RuntimeError, LookupError, ValueError, TypeError,
    AttributeError, AssertionError, OverflowError, MemoryError, struct.error,
)  # fmt: skip
_PURPOSES = ("SR", "Restoration")
_KEYS_SHOWN = 6


class Called(nn.Module):
    """A network together with the call spandrel gives it: extra inputs, a range, an index."""

    def __init__(self, network: nn.Module, call: Any) -> None:
        super().__init__()
        self.network = network
        self._call = call

    def forward(self, image: Tensor) -> Tensor:
        """(B, C, H, W) in 0..1 to (B, C', H * scale, W * scale), unclamped."""
        # Some of the calls make their extra input for one image, whatever the batch.
        results = [self._call(self.network, single) for single in image.split(1)]
        return results[0] if len(results) == 1 else torch.cat(results)


def load(path: Path, name: str, digest: str) -> tuple[nn.Module, ModelDescriptor]:
    """Recognize and build the model in a .pth, .ckpt or .safetensors file, on the CPU.

    Pickles go through an allow-list of nine names, so that nothing in them runs. Raises
    ModelError for damage, for a file that asks for more, for an unknown family, and for a
    model that does not turn one gray or RGB image into another.
    """
    state = _state_dict(path)
    if tier_file.fits(state):
        return tier_file.load(path, name, digest, state)
    found = _recognize(path, state)
    _require_image_model(path, found)
    return _module(found), _describe(path, name, digest, found)


def families() -> tuple[str, ...]:
    """Names of the families that are recognized, in alphabetical order."""
    from spandrel import MAIN_REGISTRY

    known = [entry.architecture.name for entry in MAIN_REGISTRY.architectures()]
    return tuple(sorted((*known, tier_file.FAMILY), key=str.lower))


def _state_dict(path: Path) -> dict[str, Tensor]:
    from spandrel import ModelLoader

    if path.suffix.lower() != ".safetensors" and is_zip(path):
        _refuse_torchscript(path)
    try:
        # The CPU first: what does not fit the job should not reach the device.
        state = ModelLoader(device="cpu").load_state_dict_from_file(path)
    except _DAMAGE as error:
        if isinstance(error, pickle.UnpicklingError) and "is forbidden" in str(error):
            raise ModelError(
                f"{path} asks to run code when it is loaded, and was refused: {error}",
                hint="get this model as .safetensors, which cannot hold code",
            ) from error
        raise ModelError(
            f"{path} is damaged, not written by PyTorch, or too large: {_first_line(error)}",
            hint="download it again, and compare its size with the one stated there",
        ) from error
    return _require_tensors(path, state)


def _refuse_torchscript(path: Path) -> None:
    """torch.load hands an archive with ``constants.pkl`` to TorchScript, past the allow-list.

    The names are read by the reader torch.load itself uses: another one could be shown a
    different list by a crafted archive.
    """
    try:
        records = torch._C.PyTorchFileReader(str(path)).get_all_records()
    except (RuntimeError, UnicodeDecodeError) as error:
        raise ModelError(
            f"{path} is damaged: {_first_line(error)}",
            hint="download it again, and compare its size with the one stated there",
        ) from error
    if "constants.pkl" in records:
        raise ModelError(
            f"{path} is TorchScript, which is a program, and was refused",
            hint="save the state_dict of its model as .safetensors",
        )


def _require_tensors(path: Path, state: Any) -> dict[str, Tensor]:
    tensors = isinstance(state, dict) and any(isinstance(v, Tensor) for v in state.values())
    if not tensors or not all(isinstance(key, str) for key in state):
        raise ModelError(f"{path} holds no model: no table of named tensors was found in it")
    return state


def _recognize(path: Path, state: dict[str, Tensor]) -> spandrel.ModelDescriptor:
    from spandrel import ModelLoader, UnsupportedModelError

    keys = sorted(state)
    try:
        return ModelLoader(device="cpu").load_from_state_dict(state)
    except UnsupportedModelError as error:
        shown = ", ".join(keys[:_KEYS_SHOWN])
        raise ModelError(
            f"{path} holds a model of no known family; its {len(keys)} tensors start with {shown}",
            hint=f"known families are {', '.join(families())}",
        ) from error
    except _DAMAGE as error:
        raise ModelError(
            f"{path} looks like a known family, but its tensors do not fit together: "
            f"{_first_line(error)}"
        ) from error


def _require_image_model(path: Path, found: spandrel.ModelDescriptor) -> None:
    family = found.architecture.name
    if found.purpose not in _PURPOSES:
        raise ModelError(
            f"{path} ({family}) is made for {found.purpose}, not for whole images",
            hint="give a super-resolution or restoration model",
        )
    channels = (found.input_channels, found.output_channels)
    if not set(channels) <= {1, 3}:
        raise ModelError(
            f"{path} ({family}) takes {channels[0]} channels and gives {channels[1]}; "
            f"Lowtide runs gray (1) and RGB (3)"
        )


def _module(found: spandrel.ModelDescriptor) -> nn.Module:
    # spandrel's default call lives in the module of its base class, and adds nothing.
    call = found._call_fn
    plain = call.__module__ == type(found).__module__
    model = fold(found.model.eval())
    adapt(model)
    return model if plain else Called(model, call)


def _describe(
    path: Path, name: str, digest: str, found: spandrel.ModelDescriptor
) -> ModelDescriptor:
    size = found.size_requirements
    tiling: dict[str, Tiling] = {
        "SUPPORTED": "supported", "DISCOURAGED": "discouraged", "INTERNAL": "internal",
    }  # fmt: skip
    return ModelDescriptor(
        name=name,
        architecture=str(found.architecture.id),
        purpose=found.purpose,
        scale=found.scale,
        in_channels=found.input_channels,
        out_channels=found.output_channels,
        size=SizeRule(size.minimum, size.multiple_of, size.square),
        supports_half=found.supports_half,
        supports_bfloat16=found.supports_bfloat16,
        tiling=tiling[found.tiling.name],
        tags=tuple(found.tags),
        parameters=0,
        weight_bytes=0,
        sha256=digest,
        license=None,
        path=str(path),
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
