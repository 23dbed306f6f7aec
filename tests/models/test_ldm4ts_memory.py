"""What sampling of LDM4TS takes, whatever the number of samples."""

import pytest
import torch

from lowtide.memory.live_peak import live_peak_bytes
from lowtide.models.ldm4ts import LDM4TSModel


def test_many_samples_take_as_much_memory_as_few():
    torch.manual_seed(0)
    model = LDM4TSModel((16, 24), horizons=(10,), look_back=50, variables=2, width=8).eval()
    window, drawn = torch.randn(50, 2), []

    def beyond_samples(count):
        peak = live_peak_bytes(
            lambda: drawn.append(model.sample_residuals(window, count, seed=0, steps=2))
        )
        return peak - 4 * count * 10 * 2

    beyond_samples(1)  # sets libraries up
    few, many = beyond_samples(20), beyond_samples(500)
    assert few > 0
    assert many == pytest.approx(few, rel=0.05)
    assert torch.equal(drawn[2][:20], drawn[1])
