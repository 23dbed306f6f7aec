"""Runs of plans on small images."""

import numpy as np

from lowtide.memory.plan import WholeStrategy
from support.toy_models import run_array


def whole_of(plan):
    return plan.model_copy(update={"strategy": WholeStrategy()})


def with_dry_run(bands, plan):
    """The same of ``bands``' candidates after its dry run."""
    bands.dry_run(plan)
    return next(one for one in bands.candidates() if one.strategy == plan.strategy)


def run_plan(net, array, plan, program=None, **more):
    return run_array(net, array, plan, program=program, **more)[0]


def assert_same(net, array, plan, program, **more):
    result = run_plan(net, array, plan, program, **more)
    expected = run_plan(net, array, whole_of(plan))
    assert result.dtype == expected.dtype
    step = 1e-6 if array.dtype == np.float32 else 1
    if array.shape[2] in (2, 4) and array.dtype != np.uint8:
        step *= 30  # colors are divided by opacities, and rounding with them
    np.testing.assert_allclose(result.astype(float), expected.astype(float), atol=step)
    if array.dtype == np.uint8:
        # They differ by a level only where rounding falls on a half.
        assert (result != expected).mean() < 1e-3
