"""What every test of streamed weights may use."""

import threading

import pytest
import torch

from lowtide.memory.offload.stream import stream_weights
from support.offloaded_models import Chosen, build
from support.offloaded_weights import plan_all


@pytest.fixture
def layers():
    """Eight layers, of which two are in memory at a time."""
    model = build(Chosen)
    with stream_weights(model, plan_all(model)) as stream:
        yield model, stream


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Models this small only make threads wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    assert not [t for t in threading.enumerate() if t.name.startswith("lowtide-weights")]
