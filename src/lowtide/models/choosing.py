"""What helps to choose a model: uses and speeds of the bundled ones, and where others are found."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from lowtide.models.bundled import WEIGHTS, find, names

_USE = re.compile(r"^## Intended use\n+(.+?)(?:\n\n|\Z)", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class PublishedModel:
    """A model file that others publish and Lowtide runs, and the license that its page states."""

    subject: str
    name: str
    page: str
    license: str


# Each of a family that spandrel knows. Nothing is downloaded.
_SITE = "https://openmodeldb.info/models/"
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


def use_of(name: str) -> str:
    """Return what a bundled model is for, as its card says; "" for other models."""
    if name not in names() or not (card := find(name).model_card).is_file():
        return ""
    found = _USE.search(card.read_text(encoding="utf-8"))
    return "" if found is None else " ".join(found[1].split())


def seconds_of(name: str) -> float | None:
    """Return the processor seconds of one thread for a megapixel of input; None if unmeasured."""
    return speed_file()["cpu_seconds_per_megapixel"].get(name)


@cache
def speed_file() -> dict[str, Any]:
    """Return the measured speeds, and the processor and versions that they are of."""
    return json.loads((WEIGHTS / "speed.json").read_text(encoding="utf-8"))
