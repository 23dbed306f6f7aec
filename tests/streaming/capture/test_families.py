"""Whole families of networks by bands, as others wrote them: nothing here knows their insides."""

import pytest
import torch

from lowtide.streaming.engine.placement import page_factory
from support.band_runs import by_bands, check_parity, convolved_orders, program_of
from support.stream_families import AUTOENCODERS, FAMILIES, Part, rolled


@pytest.mark.grid(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_upscalers(family):
    size = (40, 32) if family == "DRCT" else (37, 29)  # padded by its caller
    module = rolled(FAMILIES[family]()).double()
    image = torch.rand(1, 3, *size, dtype=torch.float64)
    check_parity(module, image, bands=(2, 5), parts=(1, 6), share=1e-9)


@pytest.mark.parametrize("name", AUTOENCODERS)
def test_autoencoders(name):
    make, call, channels = AUTOENCODERS[name]
    torch.manual_seed(0)
    module = Part(rolled(make()), call).double()
    image = torch.randn(1, channels, 22, 18, dtype=torch.float64)
    check_parity(module, image, bands=(1, 2, 5), parts=(1, 6), share=1e-9)


@pytest.mark.grid(4)
# Of the U-Net, PyTorch's norm leaves two maps channels last, others not; here none is, which rounds
# less.
@pytest.mark.parametrize("name", [*FAMILIES, *(one for one in AUTOENCODERS if one != "U-Net")])
def test_convolutions_get_bands_that_lie_in_memory_as_whole_maps_do(name):
    """Else other kernels would be run on them, which round otherwise; or channel after channel."""
    if name in FAMILIES:
        module, channels = FAMILIES[name](), 3
    else:
        make, call, channels = AUTOENCODERS[name]
        module = Part(make(), call)
    image = torch.rand(1, channels, 64, 40)
    program = program_of(module, image)
    with torch.no_grad():
        whole = convolved_orders(lambda: module.eval()(image))
    for placement in ("memory", "disk"):
        pages = page_factory(program, placement, image.device)
        streamed = convolved_orders(lambda pages=pages: by_bands(program, image, 5, 6, pages))
        assert len(whole.keys() & streamed.keys()) > 0
        for weight in whole.keys() & streamed.keys():
            plain = {tuple(sorted(order)) for order in whole[weight]}
            assert streamed[weight] in (whole[weight], plain)
