"""Smaller row windows between the stages of a libvips pipeline.

libvips sizes the windows by a tile height of 128, which programs can change only through its
command-line options (``vips_add_option_entries``). pyvips does not expose them, so they are
parsed here through the library's C functions. For a 24,000 pixel wide photograph this reduces
an encoder from 50 to 8 MiB.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

_OPTIONS = (b"--vips-tile-width=8", b"--vips-tile-height=8", b"--vips-fatstrip-height=8")
_MAPS = Path("/proc/self/maps")


def shrink_windows() -> bool:
    """Set the window sizes of this process's libvips; False if it is unreachable."""
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
    words = (text * (len(_OPTIONS) + 2))(b"lowtide", *_OPTIONS, None)
    count = ctypes.c_int(len(_OPTIONS) + 1)
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
