"""The VRAM estimate by attention backend, at the address where users of LDM4TS look for it."""

from lowtide.integrations.vram_usage import estimate_vram_usage

__all__ = ["estimate_vram_usage"]
