"""The bundled models: their files, uses and speeds; and where other models are found."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from lowtide.core.errors import REINSTALL, ModelError, closest_name
from lowtide.models import lowtide_files
from lowtide.models.descriptor import ModelDescriptor
from lowtide.models.model_files import sha256_of

WEIGHTS = Path(__file__).parent / "weights"

_USE = re.compile(r"^## Intended use\n+(.+?)(?:\n\n|\Z)", re.MULTILINE | re.DOTALL)
# Each of a family that spandrel knows. Nothing is downloaded.
_SITE = "https://openmodeldb.info/models/"


@dataclass(frozen=True)
class BundledModel:
    """Name, SHA-256 and license of one bundled model's weights."""

    name: str
    sha256: str
    license: str = "MIT"

    @property
    def path(self) -> Path:
        """Path of the weights."""
        return WEIGHTS / f"{self.name}.safetensors"

    @property
    def model_card(self) -> Path:
        """Path of the model card in Markdown: training data and scores."""
        return WEIGHTS / f"{self.name}.md"


_MODELS = (
    BundledModel("lowtide-x2", "c17282a19a943d7601086c078a04b75972be8d0a74599ae207ddab98e0902c1b"),
    BundledModel("lowtide-x4", "31e3da8669b94b65254cc81e198841fbd6c6cde2b70925efa936441a573fbcf4"),
    BundledModel(
        "lowtide-large-x2", "846ec65099f3d2f2559aeccbb08cc16e164106ae20c3abc9315620ca8c5bff72"
    ),
    BundledModel(
        "lowtide-large-x4", "66ed9957203536e77d672165939ce2327240e00a19f15372df0fb897a9153881"
    ),
    BundledModel(
        "lowtide-photo-x2", "9bde3311d7f497c53ee24da1c6d1e1f9f621413915ba5397be9d5831d7977ea9"
    ),
    BundledModel(
        "lowtide-photo-x4", "dcc50ead8233df2815c4a68abb7ed941d6cc7fe1a9344dff153972389aa126d4"
    ),
    BundledModel(
        "lowtide-denoise", "3fc4239f35eae642836493db5e999f866d6824d6fa6b428d82158cbe14f9bc25"
    ),
    BundledModel(
        "lowtide-photo-denoise", "2adbdbfd48661ad7a726f6b29adbd6e28f470b72cc2a23df2edde382b28c58fc"
    ),
)


def bundled_names() -> tuple[str, ...]:
    """Return the names that `lowtide.models.load` accepts in place of a file."""
    return tuple(model.name for model in _MODELS)


def find_bundled(name: str) -> BundledModel:
    """Return the entry of a bundled model by name.

    Raises ModelError with the nearest name for an unknown one.
    """
    for model in _MODELS:
        if model.name == name:
            return model
    meant = closest_name(name, bundled_names())
    raise ModelError(
        f"there is no model {name!r}; the bundled models are {', '.join(bundled_names())}",
        hint=f"did you mean {meant!r}?" if meant else "use one of these, or a model file",
    )


def describe_bundled(name: str) -> ModelDescriptor:
    """Return the descriptor of a bundled model without loading it.

    Does not import PyTorch.

    Raises ModelError for an unknown name, and for a file that is missing from the installation or
    is not the one that was released.
    """
    model = find_bundled(name)
    if not model.path.is_file():
        raise ModelError(
            f"{model.path} is missing from the installation",
            hint=REINSTALL,
        )
    digest = sha256_of(model.path)
    if digest != model.sha256:
        raise ModelError(
            f"{model.path} is not the released file: its SHA-256 is {digest}, "
            f"expected {model.sha256}",
            hint=REINSTALL,
        )
    facts = lowtide_files.describe_file(
        model.path, lowtide_files.read_metadata(model.path), name, digest
    )
    return replace(facts, license=model.license)


@dataclass(frozen=True)
class PublishedModel:
    """A model file that others publish and Lowtide runs, and the license that its page states."""

    subject: str
    name: str
    page: str
    license: str


PUBLISHED = (
    PublishedModel("faces", "4xFaceUpDAT", f"{_SITE}4x-FaceUpDAT", "CC-BY-4.0"),
    PublishedModel(
        "anime",
        "RealESRGAN_x4plus_anime_6B",
        f"{_SITE}4x-realesrgan-x4plus-anime-6b",
        "BSD-3-Clause",
    ),
    PublishedModel(
        "old films, from VHS",
        "2x VHS upscale and denoise Film",
        f"{_SITE}2x-VHS-upscale-and-denoise-Film",
        "CC-BY-NC-SA-4.0",
    ),
)


def bundled_use(name: str) -> str:
    """Return what a bundled model is for, as its card says; "" for other models."""
    if name not in bundled_names() or not (card := find_bundled(name).model_card).is_file():
        return ""
    found = _USE.search(card.read_text(encoding="utf-8"))
    return "" if found is None else " ".join(found[1].split())


def seconds_per_megapixel(name: str) -> float | None:
    """Return the processor seconds of one thread for a megapixel of input; None if unmeasured."""
    return measured_speeds()["cpu_seconds_per_megapixel"].get(name)


@cache
def measured_speeds() -> dict[str, Any]:
    """Return the measured speeds, and the processor and versions that they are of."""
    return json.loads((WEIGHTS / "speed.json").read_text(encoding="utf-8"))
