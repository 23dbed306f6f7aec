"""Device profiles packaged with Lowtide, by name."""

from __future__ import annotations

import re
from functools import cache
from importlib import resources

from lowtide.core.errors import UsageError, closest_name
from lowtide.memory.profiles.profile import DeviceProfile


def profile_names() -> tuple[str, ...]:
    """Return the names of all packaged profiles, smallest device first."""
    return tuple(_catalog())


def load_profile(name: str) -> DeviceProfile:
    """Load the packaged profile with a name, alias or title, in any case and spelling.

    ``"rtx4090-24gb"``, ``"rtx4090"``, ``"RTX 4090"`` and ``"NVIDIA GeForce RTX 4090 24 GB"`` are
    the same.

    Raises:
        UsageError: The name is unknown; the message lists the names.
    """
    spelled = _spellings()
    if found := spelled.get(_normalized(name)):
        return _catalog()[found]
    meant = closest_name(_normalized(name), spelled)
    hint = f"did you mean {spelled[meant]}?" if meant else "use one of these names"
    names = ", ".join(profile_names())
    raise UsageError(f"no device profile {name!r}; available: {names}", hint=hint)


@cache
def _catalog() -> dict[str, DeviceProfile]:
    folder = resources.files("lowtide.memory.profiles") / "data"
    profiles = [
        DeviceProfile.model_validate_json(entry.read_text(encoding="utf-8"))
        for entry in folder.iterdir()
        if entry.name.endswith(".json")
    ]
    profiles.sort(key=lambda profile: (profile.kind, profile.total_bytes, profile.name))
    return {profile.name: profile for profile in profiles}


@cache
def _spellings() -> dict[str, str]:
    return {
        _normalized(spelling): profile.name
        for profile in _catalog().values()
        for spelling in (profile.name, profile.title, *profile.aliases)
    }


def _normalized(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())
