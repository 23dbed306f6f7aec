"""Device profiles: memory and speed figures of GPUs and hosts, as data.

Planning for a device therefore does not need the device. Importing this package does not import
PyTorch; `lowtide.memory.profiles.simulated_device` does.
"""

from lowtide.memory.profiles.profile import (
    DeviceProfile,
    LibraryWorkspaces,
    Precision,
    find_profile,
    load_profile,
    local_profile,
    profile_names,
)

__all__ = [
    "DeviceProfile",
    "LibraryWorkspaces",
    "Precision",
    "find_profile",
    "load_profile",
    "local_profile",
    "profile_names",
]
