from __future__ import annotations

import subprocess
import sys

import pytest

import lowtide.media


def test_importing_media_loads_neither_torch_nor_libvips() -> None:
    code = "import sys, lowtide.media; print({'torch', 'pyvips', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_every_public_name_is_there() -> None:
    for name in lowtide.media.__all__:
        assert getattr(lowtide.media, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        _ = lowtide.media.nonsense
