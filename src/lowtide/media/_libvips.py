"""libvips configuration, error messages and heap trimming for `lowtide.media`."""

from __future__ import annotations

import ctypes
import functools
import re
from pathlib import Path

import pyvips

from lowtide.core.heap import trim_heap

# libvips keeps rows for each worker between the stages of a pipeline, so its memory grows with
# the number of cores. The AVIF encoder splits its work by the number of workers, so that the bytes
# of a file would depend on the machine. Compression is serial, and the network needs the cores.
WORKERS = 1

READ_TRIM_BYTES, WRITE_TRIM_BYTES = 8 << 20, 32 << 20
# Messages without information, and one repeated many times when a file is truncated.
_UNINFORMATIVE = re.compile(r": bad seek to \d|^system error: Unknown error")
# libjpeg's warnings that do not mean damaged data. Extraneous bytes before a restart marker do:
# they are data that could not be decoded.
_HARMLESS = re.compile(
    r"extraneous bytes before marker 0x(?!d[0-7])|unknown (Adobe|JFIF)|inconsistent progression"
    r"|invalid SOS parameters",
    re.IGNORECASE,
)

_WINDOW_OPTIONS = (b"--vips-tile-width=8", b"--vips-tile-height=8", b"--vips-fatstrip-height=8")
_MAPS = Path("/proc/self/maps")


@functools.cache
def configure_libvips() -> None:
    """Make libvips streaming-only: no operation cache, one worker, small windows."""
    pyvips.cache_set_max(0)
    pyvips.cache_set_max_mem(0)
    # pyvips adds it at run time, invisible to type checkers.
    pyvips.concurrency_set(WORKERS)  # pyright: ignore[reportAttributeAccessIssue]
    shrink_row_windows()


class HeapTrimmer:
    """Periodic ``malloc_trim`` that returns freed pixel buffers to the system.

    It trims each time ``interval_bytes`` bytes were processed. libvips allocates its row buffers
    with an alignment, and glibc cannot reuse a freed aligned block for the next one of the same
    size: without trimming, three times the memory in use stays resident.
    """

    def __init__(self, interval_bytes: int) -> None:
        self._interval_bytes, self._pending = interval_bytes, 0

    def add(self, count: int) -> None:
        """Count ``count`` processed bytes, and trim the heap if it is time."""
        self._pending += count
        if self._pending >= self._interval_bytes:
            self._pending = 0
            trim_heap()


# Errors of pyvips for a file that libvips cannot read; the second one if libvips's message quotes
# bytes of the file that are not UTF-8.
FILE_ERRORS = (pyvips.Error, UnicodeDecodeError)


def is_harmless_jpeg_error(error: pyvips.Error | UnicodeDecodeError) -> bool:
    """Return whether a JPEG error is only a warning without loss of pixels.

    Judged by libvips's last message. Such are extraneous bytes, which many cameras leave between
    segments, and unknown codes.
    """
    if isinstance(error, UnicodeDecodeError):
        return False
    lines = [line for line in str(error.detail or error.message).splitlines() if line.strip()]
    return bool(lines) and _HARMLESS.search(lines[-1]) is not None


def libvips_error_text(error: pyvips.Error | UnicodeDecodeError) -> str:
    """Return libvips's last error message on one line, without repetitions."""
    if isinstance(error, UnicodeDecodeError):
        return "libvips quotes bytes that are not text"
    lines = (line.strip() for line in str(error.detail or error.message).splitlines())
    unique = list(dict.fromkeys(line for line in lines if line and not _UNINFORMATIVE.search(line)))
    # A harmless message before the last may be of an earlier file, which could be read.
    before = [line for line in unique[-2:-1] if not _HARMLESS.search(line)]
    return "; ".join([*before, *unique[-1:]]) or "libvips gives no reason"


@functools.cache
def shrink_row_windows() -> bool:
    """Shrink libvips's row windows between the stages of a pipeline; return whether it worked.

    The memory bounds of the codecs depend on it. libvips sizes the windows by a tile height of 128,
    which programs can change only through its command-line options (``vips_add_option_entries``).
    pyvips does not expose them, so they are parsed here through the library's C functions. For a
    24,000 pixel wide photograph this reduces an encoder from 50 to 8 MiB.
    """
    path = _loaded_library()
    if path is None:
        return False
    library = ctypes.CDLL(path)
    names = (
        "g_option_group_new",
        "g_option_context_new",
        "vips_add_option_entries",
        "g_option_context_set_main_group",
        "g_option_context_parse",
    )
    if not all(hasattr(library, name) for name in names):
        return False  # a libvips that does not export GLib
    pointer, text = ctypes.c_void_p, ctypes.c_char_p
    library.g_option_group_new.restype = library.g_option_context_new.restype = pointer
    library.g_option_group_new.argtypes = [text, text, text, pointer, pointer]
    library.g_option_context_new.argtypes = [text]
    library.vips_add_option_entries.argtypes = [pointer]
    library.g_option_context_set_main_group.argtypes = [pointer, pointer]
    library.g_option_context_parse.argtypes = [pointer] * 4
    library.g_option_context_free.argtypes = [pointer]

    group = library.g_option_group_new(b"vips", b"", b"", None, None)
    library.vips_add_option_entries(group)
    context = library.g_option_context_new(None)
    library.g_option_context_set_main_group(context, group)
    words = (text * (len(_WINDOW_OPTIONS) + 2))(b"lowtide", *_WINDOW_OPTIONS, None)
    count = ctypes.c_int(len(_WINDOW_OPTIONS) + 1)
    start = ctypes.cast(words, ctypes.POINTER(text))
    done = library.g_option_context_parse(context, ctypes.byref(count), ctypes.byref(start), None)
    library.g_option_context_free(context)
    return bool(done)


def _loaded_library() -> str | None:
    """Return the libvips file that pyvips loaded, or None without ``/proc`` maps."""
    if not _MAPS.exists():
        return None
    files = {line.split(maxsplit=5)[-1] for line in _MAPS.read_text().splitlines()}
    return next((file for file in sorted(files) if Path(file).name.startswith("libvips")), None)
