"""Suppression of other libraries' log messages."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def silence_warnings(logger: str) -> Iterator[None]:
    """Suppress warnings of ``logger`` inside the block."""
    speaker = logging.getLogger(logger)
    level = speaker.level
    speaker.setLevel(logging.ERROR)
    try:
        yield
    finally:
        speaker.setLevel(level)
