"""What the documentation says is what the program does."""

import dataclasses
import inspect
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from lowtide.cli.main import app
from lowtide.core import errors
from lowtide.jobs.denoise.report import DenoisedImageReport, DenoiseReport
from lowtide.jobs.denoise.settings import DenoiseSettings
from lowtide.jobs.engine.report import AccuracyReport, ErrorFigure, MemoryReport
from lowtide.jobs.images.report import ImageReport
from lowtide.jobs.upscale.report import UpscaleReport
from lowtide.jobs.upscale.settings import UpscaleSettings
from lowtide.jobs.video.report import StreamReport, VideoReport, VideosReport
from lowtide.jobs.video.settings import VideoSettings
from lowtide.media import FORMATS

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
GUIDE = ROOT / "docs" / "guide" / "upscaling.md"
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *sorted(path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts),
]


def section(page: Path, title: str) -> str:
    """The text below a second-level heading."""
    return page.read_text(encoding="utf-8").split(f"\n## {title}\n")[1].split("\n## ")[0]


def cells(text: str) -> list[list[str]]:
    """Rows of the first Markdown table in ``text``, without its head."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_readmes_python_runs(tmp_path, monkeypatch, capsys):
    shutil.copy(ROOT / "examples" / "coffee.jpg", tmp_path / "photo.jpg")
    code = re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert code is not None
    monkeypatch.chdir(tmp_path)
    exec(code[1], {})
    accuracy, peak, budget = capsys.readouterr().out.split()
    assert accuracy == "exact"
    assert 0 <= int(peak) <= int(budget)
    assert (tmp_path / "large.png").is_file()


def is_current(script: Path) -> subprocess.CompletedProcess[str]:
    """Run a script that renders a table, with ``--check``."""
    command = [sys.executable, str(script), "--check"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("script", ["render_results.py", "render_imports.py"])
def test_the_tables_are_those_of_their_sources(script):
    done = is_current(ROOT / "scripts" / script)
    assert done.returncode == 0, done.stdout + done.stderr


def test_another_contract_is_another_table_of_packages(tmp_path):
    (tmp_path / "src").symlink_to(ROOT / "src")
    copy = tmp_path / "scripts"
    shutil.copytree(ROOT / "scripts", copy)
    shutil.copy(ROOT / "CONTRIBUTING.md", tmp_path)
    contracts = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    settings = tmp_path / "pyproject.toml"
    settings.write_text(contracts, encoding="utf-8")
    assert is_current(copy / "render_imports.py").returncode == 0
    allowed = contracts.replace('"lowtide.media", "lowtide.models", ', "")
    assert allowed != contracts
    settings.write_text(allowed, encoding="utf-8")
    done = is_current(copy / "render_imports.py")
    assert done.returncode == 1
    assert "CONTRIBUTING.md: out of date" in done.stdout


def test_the_oldest_pytorch_is_named_as_it_is_promised():
    promised = re.search(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert promised is not None
    assert f"PyTorch {promised[1]} or newer" in README.read_text(encoding="utf-8")
    assert f"allows, {promised[1]}, in" in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "command",
    [
        "upscale",
        "video",
        "plan vae",
        "vae encode",
        "vae decode",
        "vae roundtrip",
        "denoise",
        "models",
        "doctor",
        "train sr",
        "train noise",
    ],
)
def test_every_option_is_documented(command):
    page = (ROOT / "docs" / "reference" / "command_line.md").read_text(encoding="utf-8")
    found = typer.main.get_command(app)
    for word in command.split():
        found = found.commands[word]
    names = {name for option in found.params for name in (*option.opts, *option.secondary_opts)}
    options = {name for name in names if name.startswith("-")}
    assert options
    missing = {name for name in options if not re.search(rf"`{name}[ `]", page)}
    assert not missing


def test_every_documented_option_exists():
    page = ROOT / "docs" / "reference" / "command_line.md"
    documented = set(re.findall(r"`(--?[a-z][a-z-]*)", section(page, "lowtide upscale")))
    known = {
        name
        for option in typer.main.get_command(app).commands["upscale"].params
        for name in (*option.opts, *option.secondary_opts)
    }
    assert documented <= known


def test_every_setting_and_every_field_of_a_report_is_documented():
    page = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
    models = (
        UpscaleReport,
        ImageReport,
        DenoiseReport,
        DenoisedImageReport,
        AccuracyReport,
        ErrorFigure,
        MemoryReport,
        VideosReport,
        VideoReport,
        StreamReport,
    )
    fields = {f"{model.__name__}.{name}" for model in models for name in model.model_fields}
    for settings in (UpscaleSettings, DenoiseSettings, VideoSettings):
        fields |= {f"{settings.__name__}.{one.name}" for one in dataclasses.fields(settings)}
    assert not {field for field in fields if f"`{field.split('.')[1]}`" not in page}


def test_the_exit_codes_are_those_of_the_errors():
    documented = {
        name: int(code)
        for code, _, names in cells(section(GUIDE, "Exit codes"))
        for name in re.findall(r"`(\w+)`", names)
    }
    classes = inspect.getmembers(errors, inspect.isclass)
    assert documented == {
        name: kind.exit_code for name, kind in classes if issubclass(kind, errors.LowtideError)
    }


def test_the_formats_are_those_of_the_package():
    assert cells(section(GUIDE, "Formats and metadata")) == [
        [
            entry.name,
            " ".join(entry.suffixes),
            f"{entry.max_side:,}",
            str(entry.bits),
            "yes" if entry.alpha else "no",
            ", ".join(sorted(entry.metadata_kinds)),
        ]
        for entry in FORMATS
        if entry.save
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_to_files(page):
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    local = [link for link in links if not link.startswith(("http:", "https:", "mailto:"))]
    assert not [link for link in local if not (page.parent / link).exists()]
