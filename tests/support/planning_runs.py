"""Planning and first call of a small decoder, measured in a process of its own."""

import sys

import torch

import lowtide
from lowtide.memory.meter import HostMeter
from support.tiny_autoencoders import small_vae


def first_call_in_96_mib():
    """Peak of planning and first call above what the process had, bytes of bands, operators."""
    stream, latents = lowtide.stream(small_vae().decoder, budget="96MiB"), latents_of(768)
    meter = HostMeter(0.002)
    meter.start()
    with torch.no_grad():
        stream(latents)
        peak = meter.peak_bytes
        known = stream.prepare(latents)
    meter.stop()
    return peak, known.layout.peak_bytes, len(known.program.steps)


def modules_of_first_call():
    """Modules of PyTorch's tracing that a first call imports."""
    stream = lowtide.stream(small_vae().decoder, budget="64MiB")
    before = set(sys.modules)
    with torch.no_grad():
        stream(latents_of(32))
    names = ("torch._dynamo", "torch._inductor", "torch.export", "torch.fx", "sympy")
    return sorted(name for name in set(sys.modules) - before if name.startswith(names))


def latents_of(side):
    return torch.rand(1, 4, side, side)
