"""Running commands: in this process where possible, since starting PyTorch takes seconds."""

import json
import subprocess
import sys
from typing import Any, NamedTuple

import pytest


@pytest.fixture(scope="module", autouse=True)
def quick(private_cache):
    from support.measured_costs import quick_jobs

    yield from quick_jobs()


class Result(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def lowtide(capsys, monkeypatch):
    """Run `lowtide WORDS` here; returns its exit code and what it printed."""
    from lowtide.cli.main import main
    from lowtide.core import heap

    # A setting of a whole process, and this one runs other tests.
    monkeypatch.setattr(heap, "tune_heap", lambda: False)
    monkeypatch.setenv("COLUMNS", "100")

    def run(*words) -> Result:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        code = ended.value.code
        assert code is None or isinstance(code, int)
        return Result(code or 0, *capsys.readouterr())

    return run


@pytest.fixture
def lowtide_process():
    """Run `lowtide WORDS` as a process of its own."""

    def run(*words, **options) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "lowtide", *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, **options)

    return run


@pytest.fixture
def source(tmp_path, save, photo):
    return save(tmp_path / "photo.png", photo[100:160, 200:270])


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out.png"
