"""Progress and cancellation."""

import threading

import pytest

from lowtide import Cancelled
from lowtide.core.progress import Progress, raise_if_cancelled


def test_the_remaining_time_follows_the_speed():
    assert Progress("run", done=50, total=200, elapsed=10).eta == pytest.approx(30)
    assert Progress("run", done=0, total=200, elapsed=10).eta is None
    assert Progress("load").eta is None


def test_events_and_callables_cancel():
    event = threading.Event()
    for cancel in (None, event, lambda: False):
        raise_if_cancelled(cancel)
    event.set()
    for cancel in (event, lambda: True):
        with pytest.raises(Cancelled):
            raise_if_cancelled(cancel)
