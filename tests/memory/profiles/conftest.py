"""The GPU of this machine."""

import pytest
import torch

from lowtide.memory.profiles import local_profile


@pytest.fixture
def gpu():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device on this machine")
    return local_profile("cuda:0")
