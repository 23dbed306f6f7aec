"""Fixtures of the tests of streaming."""

import pytest
import torch

from support.stream_models import Normed


@pytest.fixture(scope="module")
def model():
    return Normed().eval()


@pytest.fixture
def results_alone(tmp_path, monkeypatch):
    """No gradients, and nothing that another test stored."""
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "cache"))
    with torch.no_grad():
        yield
