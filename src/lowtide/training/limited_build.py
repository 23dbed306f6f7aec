"""Networks of a configuration, whose sizes are numbers of any size, built within the memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lowtide.core.errors import UsageError
from lowtide.core.units import format_bytes
from lowtide.memory.process_memory import available_host_bytes
from lowtide.models.build_limits import BuildLimits, TooLargeError


@contextmanager
def limited_build(section: str) -> Iterator[None]:
    """Refuse a network of ``section`` that takes more memory than there is, by `UsageError`."""
    room = available_host_bytes()
    try:
        with BuildLimits.of_memory(room):
            yield
    except TooLargeError as error:
        raise UsageError(
            f"{section}: a network of these sizes takes more than the {format_bytes(room)} of"
            " memory that there are, or has hundreds of thousands of layers",
            hint="fewer channels or blocks",
        ) from error
