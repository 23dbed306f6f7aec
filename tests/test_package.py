"""What the package promises to those who import it."""

import ast
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

import lowtide

HEAVY = ("torch", "numpy", "pydantic", "pyvips", "spandrel")


def test_the_public_names():
    assert lowtide.__all__ == [
        "BatchError",
        "Budget",
        "BudgetError",
        "Cancelled",
        "DenoiseReport",
        "Estimate",
        "Forecast",
        "ImageError",
        "InferenceStep",
        "InputError",
        "LowtideError",
        "ModelError",
        "NotFiniteError",
        "OutOfMemoryError",
        "OutputError",
        "Plan",
        "Progress",
        "Streamed",
        "TrainingStep",
        "UpscaleReport",
        "UsageError",
        "VideoError",
        "VideosReport",
        "__version__",
        "backtest",
        "denoise",
        "estimate",
        "estimate_vram_usage",
        "fit",
        "forecast",
        "load",
        "measure",
        "plan",
        "stream",
        "unfit",
        "upscale",
        "video",
    ]
    assert all(getattr(lowtide, name) is not None for name in lowtide.__all__)
    assert set(lowtide.__all__) <= set(dir(lowtide))
    with pytest.raises(AttributeError, match="no attribute 'upscael'"):
        lowtide.upscael  # noqa: B018


def test_every_error_has_its_exit_code():
    codes = {
        "BatchError": 4,
        "BudgetError": 3,
        "Cancelled": 130,
        "ImageError": 2,
        "InputError": 2,
        "LowtideError": 1,
        "ModelError": 2,
        "NotFiniteError": 1,
        "OutOfMemoryError": 1,
        "OutputError": 1,
        "UsageError": 2,
        "VideoError": 2,
    }
    for name, code in codes.items():
        error = getattr(lowtide, name)
        assert issubclass(error, lowtide.LowtideError)
        assert error.exit_code == code


def test_importing_and_asking_for_help_load_nothing_heavy():
    code = f"""
import sys
import lowtide
from lowtide.cli.main import main
heavy = {HEAVY!r}
assert not set(heavy) & set(sys.modules), "import"
helps = [[name, "--help"] for name in ("doctor", "upscale", "video")]
for words in ([], ["--help"], ["--version"], *helps):
    try:
        main(words)
    except SystemExit:
        pass
    assert not set(heavy) & set(sys.modules), words
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_modules_of_files_and_plans_import_torch_in_functions_only():
    source = Path(lowtide.__file__).parent
    rooms = [source / room for room in ("core", "cli", "media", "jobs")]
    planning = ("tiles/grid", "planner/model_facts", "planner/tile_candidates")
    modules = [path for room in rooms for path in room.rglob("*.py")]
    modules += [source / "streaming" / f"{name}.py" for name in planning]
    for path in modules:
        for node in ast.parse(path.read_text()).body:  # not in functions, nor for types alone
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.split(".")[0] == "torch"], path


def test_it_is_typed_and_has_one_version():
    assert (Path(lowtide.__file__).parent / "py.typed").is_file()
    assert lowtide.__version__ == importlib.metadata.version("lowtide")
