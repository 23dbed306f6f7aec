"""The card of this machine."""

import pytest
import torch

from lowtide.memory.profiles import profile_of


@pytest.fixture
def card():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device on this machine")
    return profile_of("cuda:0")
