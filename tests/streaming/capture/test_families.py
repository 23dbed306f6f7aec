"""Whole families of networks by bands, as others wrote them: nothing here knows their insides."""

import pytest
import torch

from lowtide.streaming.engine.placement import page_factory
from support.band_runs import by_bands, check_parity, convolved_orders, program_of
from support.stream_families import AUTOENCODERS, FAMILIES, Part, rolled


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [(37, 29), (64, 40)])
def test_upscalers(family, size):
    if family == "DRCT":  # padded by its caller
        size = tuple(-(-side // 8) * 8 for side in size)
    module = rolled(FAMILIES[family]()).double()
    image = torch.rand(1, 3, *size, dtype=torch.float64)
    check_parity(module, image, bands=(2, 5), parts=(1, 6), share=1e-9)


@pytest.mark.parametrize("name", AUTOENCODERS)
@pytest.mark.parametrize("size", [(22, 18), (36, 16)])
def test_autoencoders(name, size):
    make, call, channels = AUTOENCODERS[name]
    torch.manual_seed(0)
    module = Part(rolled(make()), call).double()
    image = torch.randn(1, channels, *size, dtype=torch.float64)
    check_parity(module, image, bands=(1, 2, 5), parts=(1, 6), share=1e-9)


# Of the U-Net, PyTorch's norm leaves two maps channels last, others not; here none is, which rounds
# less.
@pytest.mark.parametrize("name", [*FAMILIES, *(one for one in AUTOENCODERS if one != "U-Net")])
@pytest.mark.parametrize("pages", ["memory", "disk"])
def test_convolutions_get_bands_that_lie_in_memory_as_whole_maps_do(name, pages):
    """Else other kernels would be run on them, which round otherwise; or channel after channel."""
    if name in FAMILIES:
        module, channels = FAMILIES[name](), 3
    else:
        make, call, channels = AUTOENCODERS[name]
        module = Part(make(), call)
    image = torch.rand(1, channels, 64, 40)
    program = program_of(module, image)
    make_page = page_factory(program, pages, image.device)
    with torch.no_grad():
        whole = convolved_orders(lambda: module.eval()(image))
    streamed = convolved_orders(lambda: by_bands(program, image, 5, 6, make_page))
    assert len(whole.keys() & streamed.keys()) > 0
    for weight in whole.keys() & streamed.keys():
        plain = {tuple(sorted(order)) for order in whole[weight]}
        assert streamed[weight] in (whole[weight], plain)
