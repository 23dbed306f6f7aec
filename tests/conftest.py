"""What every test may use: private caches, real photographs, and data that is not shipped."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    # Read when Triton is first imported: its programs then run on the CPU.
    os.environ.setdefault("TRITON_INTERPRET", "1")

ROOT = Path(__file__).parent.parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Of a test marked ``grid(n)`` every n-th case runs by default, the others with ``slow``."""
    counted = {}
    for item in items:
        grid = item.get_closest_marker("grid")
        if grid is not None:
            test = item.nodeid.partition("[")[0]
            counted[test] = counted.get(test, -1) + 1
            if counted[test] % grid.args[0]:
                item.add_marker("slow")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """A test marked ``own_process`` is run by a pytest of its own, with nothing before it: what
    other tests left behind, and let go of later, would be in its figures."""
    if pyfuncitem.get_closest_marker("own_process") is None or "TEST_ALONE" in os.environ:
        return None
    environment = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-m",
            "",
            "-rs",
            "-p",
            "no:cacheprovider",
            f"{pyfuncitem.path}::{pyfuncitem.nodeid.partition('::')[2]}",
        ],
        cwd=ROOT,
        env=environment | {"TEST_ALONE": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode != 0 or "1 passed" not in done.stdout + done.stderr:
        if "1 skipped" in done.stdout:
            pytest.skip(done.stdout.strip().splitlines()[-2])
        pytest.fail(f"in a process of its own:\n{done.stdout}{done.stderr}", pytrace=False)
    return True


@pytest.fixture(scope="session", autouse=True)
def private_cache(tmp_path_factory):
    """Measurements of this test run only; shared by the processes that tests start."""
    folder = tmp_path_factory.mktemp("cache")
    os.environ["LOWTIDE_CACHE"] = str(folder)
    return folder


@pytest.fixture(autouse=True)
def no_past_runs(private_cache):
    """Bounds of plans as they are before the first run, whatever ran before a test."""
    for path in private_cache.glob("plans/runs-*"):
        path.unlink()


@pytest.fixture(scope="session")
def photo():
    """The example photograph, (400, 600, 3) uint8."""
    import pyvips

    return pyvips.Image.new_from_file(str(ROOT / "examples" / "coffee.jpg")).numpy()


@pytest.fixture(scope="session")
def data_folder():
    """The folder of real weights and benchmark images, which is not part of the project."""
    for folder in (os.environ.get("LOWTIDE_DATA"), ROOT.parent / "shared" / "data"):
        if folder and Path(folder).is_dir():
            return Path(folder)
    pytest.skip("no data folder: set LOWTIDE_DATA to run this on real weights and Set5")


@pytest.fixture(scope="session")
def onnx_x2(tmp_path_factory):
    """lowtide-x2 as an ONNX file."""
    for package in ("onnx", "onnxruntime", "onnxscript"):
        pytest.importorskip(package)
    import lowtide
    from support.onnx_files import exported

    return exported(lowtide.load("lowtide-x2"), tmp_path_factory.mktemp("onnx") / "x2.onnx")


@pytest.fixture
def files_of_at_most(monkeypatch):
    """A context that limits files to a number of bytes, as a full disk does."""
    resource = pytest.importorskip("resource", reason="limits files as Unix does")

    @contextlib.contextmanager
    def limited(size: int):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        # Python would keep the first bytes of what it compiles, and fail on them from then on.
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limited


@pytest.fixture
def save():
    """Write an array as an image file; the suffix says which format."""
    import pyvips

    def write(path: Path, array: np.ndarray, **options) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        pyvips.Image.new_from_array(np.ascontiguousarray(array)).write_to_file(str(path), **options)
        return path

    return write


@pytest.fixture
def read():
    """Read an image file as an array, (height, width, bands)."""
    import pyvips

    def load(path: Path) -> np.ndarray:
        array = pyvips.Image.new_from_file(str(path)).numpy()
        return array[..., None] if array.ndim == 2 else array

    return load
