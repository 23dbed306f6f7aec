"""The bundled models and the SHA-256 of their files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from lowtide.core.errors import ModelError, closest_name
from lowtide.core.install_hints import REINSTALL
from lowtide.models import lowtide_files
from lowtide.models.descriptor import ModelDescriptor
from lowtide.models.model_files import sha256_of

WEIGHTS = Path(__file__).parent / "weights"


@dataclass(frozen=True)
class Bundled:
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
    Bundled("lowtide-x2", "c17282a19a943d7601086c078a04b75972be8d0a74599ae207ddab98e0902c1b"),
    Bundled("lowtide-x4", "31e3da8669b94b65254cc81e198841fbd6c6cde2b70925efa936441a573fbcf4"),
    Bundled("lowtide-large-x2", "846ec65099f3d2f2559aeccbb08cc16e164106ae20c3abc9315620ca8c5bff72"),
    Bundled("lowtide-large-x4", "66ed9957203536e77d672165939ce2327240e00a19f15372df0fb897a9153881"),
    Bundled("lowtide-photo-x2", "9bde3311d7f497c53ee24da1c6d1e1f9f621413915ba5397be9d5831d7977ea9"),
    Bundled("lowtide-photo-x4", "dcc50ead8233df2815c4a68abb7ed941d6cc7fe1a9344dff153972389aa126d4"),
    Bundled("lowtide-denoise", "3fc4239f35eae642836493db5e999f866d6824d6fa6b428d82158cbe14f9bc25"),
    Bundled(
        "lowtide-photo-denoise", "2adbdbfd48661ad7a726f6b29adbd6e28f470b72cc2a23df2edde382b28c58fc"
    ),
)


def names() -> tuple[str, ...]:
    """Return the names that `lowtide.models.load` accepts in place of a file."""
    return tuple(model.name for model in _MODELS)


def find(name: str) -> Bundled:
    """Return the entry of a bundled model by name.

    Raises ModelError with the nearest name for an unknown one.
    """
    for model in _MODELS:
        if model.name == name:
            return model
    meant = closest_name(name, names())
    raise ModelError(
        f"there is no model {name!r}; the bundled models are {', '.join(names())}",
        hint=f"did you mean {meant!r}?" if meant else "use one of these, or a model file",
    )


def describe(name: str) -> ModelDescriptor:
    """Return the descriptor of a bundled model without loading it.

    Does not import PyTorch.

    Raises ModelError for an unknown name, and for a file that is missing from the installation or
    is not the one that was released.
    """
    model = find(name)
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
