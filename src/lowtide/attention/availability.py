"""Which implementations of attention could run here, and what the others lack."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lowtide.attention.backends import BACKENDS
from lowtide.attention.halo.autograd import is_preferred
from lowtide.attention.halo.autograd import missing as halo_missing
from lowtide.attention.spec import LocalDevice

_HALO = "triton-halo"


@dataclass(frozen=True)
class Availability:
    """One implementation: whether it could run, and why not or what it is."""

    name: str
    available: bool
    reason: str
    fix: str = ""


def availability() -> list[Availability]:
    """Every backend, on this machine's first GPU or on its CPU, in order of preference; then the
    kernel for windows over images, which is no backend."""
    device = LocalDevice.of(torch.device("cuda:0" if torch.cuda.is_available() else "cpu"))
    found = []
    for name, backend in BACKENDS.items():
        missing = backend.missing(device)
        if missing is not None:
            found.append(Availability(name, False, missing.reason, missing.fix))
        elif device.kind in backend.verified:
            found.append(Availability(name, True, backend.about))
        else:
            about = f"{backend.about}; unverified here, taken only when asked for by name"
            found.append(Availability(name, True, about))
    missing = halo_missing(device)
    if missing is not None:
        found.append(Availability(_HALO, False, missing.reason, missing.fix))
    else:
        about = "one Triton kernel for windows over images"
        if not is_preferred(device, torch.bfloat16):
            about += "; unverified here, kernel='triton' asks for it"
        found.append(Availability(_HALO, True, about))
    return found
