"""Planning and first call of a small decoder, measured in a process of its own."""

import sys

import torch

import lowtide
from lowtide.memory.meter import HostMemoryMeter
from support.tiny_autoencoders import small_vae


def first_call_in_96_mib():
    """Of planning and first call, above what the process had: the peak, and imported modules of
    PyTorch's tracing; then bytes of bands and operators."""
    stream = lowtide.stream(small_vae().decoder, budget="96MiB")
    latents, before = torch.rand(1, 4, 768, 768), set(sys.modules)
    meter = HostMemoryMeter(0.002)
    meter.start()
    with torch.no_grad():
        stream(latents)
        peak = meter.peak_bytes
        known = stream.prepare(latents)
    meter.stop()
    names = ("torch._dynamo", "torch._inductor", "torch.export", "torch.fx", "sympy")
    loaded = sorted(name for name in set(sys.modules) - before if name.startswith(names))
    return {
        "peak": peak,
        "loaded": loaded,
        "layout": known.layout.peak_bytes,
        "steps": len(known.program.steps),
    }
