"""Fixtures of the tests of streaming."""

import pytest

from support.stream_models import Normed


@pytest.fixture(scope="module")
def model():
    return Normed().eval()
