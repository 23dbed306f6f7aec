"""Device profiles: what a card or a host offers, as data, so that no device is needed to plan.

Importing this package does not import PyTorch; `lowtide.memory.profiles.attention` does.
"""

from lowtide.memory.profiles.local_device import profile_for, profile_of
from lowtide.memory.profiles.profile import DeviceProfile, Precision, Provenance, Workspaces
from lowtide.memory.profiles.shipped import load_profile, profile_names

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
