"""Planning and first call of a small decoder, measured in a process of its own."""

import torch

import lowtide
from lowtide.memory.meter import HostMeter
from support.tiny_autoencoders import small_vae


def first_call(budget):
    """Peaks of planning and of the first call in bytes, and what planning says of itself."""
    stream, latents = lowtide.stream(small_vae().decoder, budget=budget), torch.rand(1, 4, 512, 512)
    meter = HostMeter(0.002)
    meter.start()
    with torch.no_grad():
        planning = stream.prepare(latents).planning
        planned = meter.lap().peak_bytes
        stream(latents)
        run = meter.lap().peak_bytes
    meter.stop()
    assert planning is not None
    return planned, run, planning.expected_bytes, planning.peak_bytes, planning.held_bytes


def first_call_in_68_mib():
    return first_call("68MiB")
