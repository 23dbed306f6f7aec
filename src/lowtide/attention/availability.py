"""Which implementations of attention could run here, and what the others lack."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from dataclasses import dataclass


@dataclass(frozen=True)
class Backend:
    """One implementation: whether it could run, and why not or where."""

    name: str
    available: bool
    reason: str
    fix: str = ""


def backends() -> list[Backend]:
    """Every backend that Lowtide knows, in the order of its documentation. Imports PyTorch."""
    capability = _capability()
    return [
        Backend("sdpa-math", True, "part of PyTorch, on any device"),
        _sdpa("sdpa-flash", capability, (8, 0), cpu=True),
        _sdpa("sdpa-efficient", capability, (5, 0), cpu=False),
        _sdpa("sdpa-cudnn", capability, (8, 0), cpu=False),
        _triton("flex", capability),
        _package("flash-attn", "flash_attn", capability, (8, 0), "pip install lowtide[flash]"),
        _package("sageattention", "sageattention", capability, (8, 0), "pip install lowtide[sage]"),
    ]


def _capability() -> tuple[int, int] | None:
    import torch

    return torch.cuda.get_device_capability(0) if torch.cuda.is_available() else None


def _sdpa(
    name: str, capability: tuple[int, int] | None, least: tuple[int, int], *, cpu: bool
) -> Backend:
    if capability is None:
        return Backend(name, cpu, "on the CPU" if cpu else "needs a CUDA device")
    if capability < least:
        return Backend(name, False, _too_old(capability, least))
    return Backend(name, True, f"on this GPU (compute capability {_dotted(capability)})")


def _triton(name: str, capability: tuple[int, int] | None) -> Backend:
    if importlib.util.find_spec("triton") is None:
        return Backend(name, False, "Triton is not installed", "pip install triton")
    if capability is None:
        return Backend(name, False, "needs a CUDA device; on the CPU it is slower than math")
    return Backend(name, True, f"Triton {importlib.metadata.version('triton')}")


def _package(
    name: str, module: str, capability: tuple[int, int] | None, least: tuple[int, int], fix: str
) -> Backend:
    if importlib.util.find_spec(module) is None:
        return Backend(name, False, "not installed", fix)
    if capability is None:
        return Backend(name, False, "installed, but needs a CUDA device")
    if capability < least:
        return Backend(name, False, _too_old(capability, least))
    return Backend(name, True, f"version {importlib.metadata.version(name)}")


def _too_old(capability: tuple[int, int], least: tuple[int, int]) -> str:
    return f"needs compute capability {_dotted(least)}, this GPU has {_dotted(capability)}"


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
