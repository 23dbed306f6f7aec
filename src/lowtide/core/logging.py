"""Keeping other libraries from talking to our users about their own affairs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def silence_warnings(logger: str) -> Iterator[None]:
    """No warnings of this logger."""
    speaker = logging.getLogger(logger)
    level = speaker.level
    speaker.setLevel(logging.ERROR)
    try:
        yield
    finally:
        speaker.setLevel(level)
