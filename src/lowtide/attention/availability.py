"""Availability of attention backends on this machine, and missing requirements."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lowtide.attention.backends import BACKENDS
from lowtide.attention.halo.autograd import is_preferred
from lowtide.attention.halo.autograd import missing_requirement as halo_missing
from lowtide.attention.spec import LocalDevice

_HALO = "triton-halo"


@dataclass(frozen=True)
class BackendAvailability:
    """Availability of one attention backend on this machine, with the reason.

    ``reason`` describes the backend if it is available, and says why not otherwise. ``fix`` is how
    to make it available.
    """

    name: str
    available: bool
    reason: str
    fix: str = ""


def backend_availability() -> list[BackendAvailability]:
    """Return the availability of every attention backend on this machine.

    Checked for the first GPU, or for the CPU if there is none. Backends come in order of
    preference; the Triton kernel for windows over images, which is not an `AttentionBackend`, comes
    last.
    """
    device = LocalDevice.of(torch.device("cuda:0" if torch.cuda.is_available() else "cpu"))
    found = []
    for name, backend in BACKENDS.items():
        missing = backend.missing_requirement(device)
        if missing is not None:
            found.append(BackendAvailability(name, False, missing.reason, missing.fix))
        elif device.kind in backend.verified_on:
            found.append(BackendAvailability(name, True, backend.about))
        else:
            about = f"{backend.about}; unverified here, used only by name"
            found.append(BackendAvailability(name, True, about))
    missing = halo_missing(device)
    if missing is not None:
        found.append(BackendAvailability(_HALO, False, missing.reason, missing.fix))
    else:
        about = "one Triton kernel for windows over images"
        if not is_preferred(device, torch.bfloat16):
            about += "; unverified here, used only with kernel='triton'"
        found.append(BackendAvailability(_HALO, True, about))
    return found
