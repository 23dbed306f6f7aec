"""What PyTorch cannot do on this processor."""

import pytest
import torch

# Where there is no AVX2 its compiler writes vector types that it does not include.
needs_the_compiler = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT",
    reason="PyTorch's compiler fails on processors without AVX2",
)
