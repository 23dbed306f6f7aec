"""Energy score of sample paths: how good a joint distribution of steps and variables is."""

from __future__ import annotations

import numpy as np


def energy_score(truth: np.ndarray, samples: np.ndarray) -> float:
    """Return the fair energy score of ``samples`` [S, H, D] for one window's ``truth`` [H, D].

    It is the mean distance to the truth less half the mean distance of two samples (Gneiting and
    Raftery, "Strictly Proper Scoring Rules, Prediction, and Estimation", 2007), in memory of S * S.
    Missing targets do not count; NaN where there is none.
    """
    seen = np.isfinite(truth)
    if not seen.any():
        return float("nan")
    # Distances are of vectors less the truth, whose products lose no digits to its level.
    errors = (samples - truth)[:, seen]
    products = errors @ errors.T
    squares = np.diagonal(products)
    between = np.sqrt(np.maximum(squares[:, None] + squares - 2 * products, 0.0))
    np.fill_diagonal(between, 0.0)
    pairs = len(errors) * (len(errors) - 1)
    return float(np.sqrt(squares).mean() - between.sum() / (2 * pairs))
