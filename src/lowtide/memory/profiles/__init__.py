"""Device profiles: what a card or a host offers, as data, so that no device is needed to plan.

Importing this package does not import PyTorch; `lowtide.memory.profiles.attention` does.
"""

from lowtide.memory.profiles.catalog import load_profile, profile_names
from lowtide.memory.profiles.present import profile_for, profile_of
from lowtide.memory.profiles.profile import DeviceProfile, Precision, Provenance, Workspaces

__all__ = [
    "DeviceProfile",
    "Precision",
    "Provenance",
    "Workspaces",
    "load_profile",
    "profile_for",
    "profile_names",
    "profile_of",
]
