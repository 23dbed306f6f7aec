"""Random numbers as a function of four integers, equal for any batch, band or device.

Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) is a function of a key
and a counter: no state is saved or shared between threads.
"""

from __future__ import annotations

import numpy as np

from lowtide.core.errors import UsageError
from lowtide.core.option import MOST_SEED


def philox_generator(seed: int, purpose: int, major: int, minor: int) -> np.random.Generator:
    """Return a Philox generator keyed by four integers, each from 0 to 2**64 - 1.

    Raises:
        UsageError: The seed, which is a user's number, is beyond.
    """
    if not 0 <= seed < 1 << 64:
        raise UsageError(f"a seed is from 0 to {MOST_SEED:,}, not {seed}")
    # The lower half of the counter counts the numbers drawn.
    counter = np.array([0, 0, minor, major], np.uint64)
    key = np.array([seed, purpose], np.uint64)
    return np.random.Generator(np.random.Philox(counter=counter, key=key))
