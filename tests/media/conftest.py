"""Fixtures of the tests of media."""

import pytest


@pytest.fixture(scope="module")
def quick(private_cache):
    """Jobs that measure nothing."""
    from support.measured_costs import quick_jobs

    yield from quick_jobs()


@pytest.fixture(scope="module")
def piece(photo):
    """A piece of the photograph, (40, 56, 3)."""
    return photo[100:140, 200:256]
