"""Pictures compared level by level."""

import numpy as np


def assert_within_a_level(a, b):
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    assert np.abs(a.astype(int) - b.astype(int)).max() <= 1
