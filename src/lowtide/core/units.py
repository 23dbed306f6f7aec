"""Parsing and formatting of byte counts and seconds.

Byte counts are such as ``6GiB``, ``900 MB`` or ``1.5g``.
"""

from __future__ import annotations

import re

from lowtide.core.errors import UsageError

KIB, MIB, GIB, TIB = (1 << 10 * power for power in (1, 2, 3, 4))

# A bare letter means the binary unit, as in every memory tool (`-Xmx6g`, `docker -m 6g`).
_UNITS = {
    "": 1,
    "b": 1,
    "k": KIB,
    "kib": KIB,
    "kb": 10**3,
    "m": MIB,
    "mib": MIB,
    "mb": 10**6,
    "g": GIB,
    "gib": GIB,
    "gb": 10**9,
    "t": TIB,
    "tib": TIB,
    "tb": 10**12,
}
_PATTERN = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(text: str | int, *, what: str = "size") -> int:
    """Parse ``"6GiB"``, ``"900MB"``, ``"512m"`` or a plain number of bytes.

    Raises:
        UsageError: naming ``what``, for anything else and for zero.
    """
    match = _PATTERN.fullmatch(str(text))
    unit = match.group(2).lower() if match else None
    if match is None or unit not in _UNITS:
        raise UsageError(
            f"{what} {text!r} is not a number of bytes", hint="write it as 6GiB, 900MB or 512m"
        )
    count = int(float(match.group(1)) * _UNITS[unit])
    if count <= 0:
        raise UsageError(f"{what} {text!r} must be at least one byte")
    return count


def format_bytes(count: float) -> str:
    """Format a byte count: ``1288490188`` as ``1.20 GiB``.

    Three significant digits, binary units.
    """
    sign = "-" if count < 0 else ""
    value, names = abs(float(count)), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1023.5 and len(names) > 1:
        value /= 1024
        names.pop(0)
    if names[0] == "B":
        return f"{sign}{value:.0f} B"
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{sign}{value:.{digits}f} {names[0]}"


def format_seconds(seconds: float) -> str:
    """Format seconds: ``4210`` as ``1:10:10``, ``4.2`` as ``4.2 s``.

    ``70`` is ``1:10``.
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
