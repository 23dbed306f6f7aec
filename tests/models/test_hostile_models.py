"""A corpus of damaged and hostile model files: each is a model or an error of Lowtide's."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

import lowtide
from lowtide import LowtideError
from support import hostile_models
from support.fuzz_workers import run_all
from support.process_limit import process_limit

FILES, SEED = 200, 58
# A file of some hundred kilobytes may take this much on top of what is imported.
MOST = 1 << 30


def _loaded(path: Path) -> str:
    """What became of a file; anything but a model or a deliberate error is raised."""
    warnings.simplefilter("ignore")  # spandrel's of torch.meshgrid
    torch.set_num_threads(1)
    with process_limit(MOST):
        try:
            model = lowtide.load(path)
        except LowtideError as error:
            return f"{type(error).__name__}: {error}"
    return model.descriptor.architecture


def test_sound_files_load(tmp_path: Path) -> None:
    for kind, contents in hostile_models.sound(tmp_path).items():
        for content in contents:
            (tmp_path / kind).write_bytes(content)
            assert ":" not in _loaded(tmp_path / kind)


@pytest.mark.slow
def test_each_file_is_a_model_or_an_error_of_ours(tmp_path: Path) -> None:
    outcomes = run_all(_loaded, hostile_models.write(tmp_path, FILES, SEED), seconds=30)
    faults = [f"{one.case}: {one.fault}" for one in outcomes if one.fault]
    assert not faults, "\n\n".join(faults)
    refused = sum(one.result.startswith("ModelError") for one in outcomes)
    # Of 200, some are sound after all: a changed name in the metadata, a weight.
    assert FILES * 0.6 < refused < FILES
