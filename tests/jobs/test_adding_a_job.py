"""A kind of job that is no image is one module of jobs and one of the command line."""

import json
from pathlib import Path

import pytest
import typer

from lowtide import BatchError, UsageError
from lowtide.cli.settings_options import with_settings
from lowtide.cli.shell import report_errors
from support import series_job


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "in"
    (root / "deep").mkdir(parents=True)
    (root / "a.csv").write_text("1\n2\n6\n3\n")
    (root / "deep" / "b.csv").write_text("4\n4\n4\n")
    (root / "notes.txt").write_text("not a series")
    return root


@pytest.mark.parametrize("workers", [0, 1])
def test_a_folder_of_series_is_planned_run_and_resumed(folder, tmp_path, workers):
    out, events = tmp_path / "out", []
    report = series_job.average(
        [folder], out, workers=workers, sidecar=True, progress=events.append, budget="64MiB"
    )
    assert [(one.status, one.steps) for one in report.series] == [("done", 4), ("done", 3)]
    assert (out / "a.csv").read_text().split() == ["3", "3.66667"]
    assert (out / "deep" / "b.csv").read_text().split() == ["4"]
    assert [Path(one.path).name for one in report.skipped_inputs] == ["notes.txt"]
    memory = report.series[0].memory
    assert memory is not None and memory.budget_bytes == 64 << 20
    assert json.loads((out / "a.csv.lowtide.json").read_text())["series"]["steps"] == 4
    assert events[-1].done == events[-1].total == 3

    (folder / "a.csv").write_text("3\nthree\n")
    again = series_job.average([folder], out, workers=workers, force=False)
    assert [one.status for one in again.series] == ["failed", "skipped"]
    with pytest.raises(BatchError, match="1 of 2 series failed"):
        again.raise_for_failures()
    assert not list(out.rglob("*.part"))


def test_its_command_has_an_option_for_each_setting(folder, tmp_path, capsys):
    app, given = typer.Typer(), {}

    @app.command()
    @report_errors
    @with_settings(series_job.AverageSettings)
    def average(inputs: list[str], output: str, **settings):
        given.update(settings)
        print(series_job.average(inputs, output, **settings).series[0].status)

    with pytest.raises(SystemExit) as ended:
        app([str(folder / "a.csv"), f"{tmp_path}/a2.csv", "--window", "2", "-b", "1GiB"])
    assert (ended.value.code, capsys.readouterr().out) == (0, "done\n")
    assert (tmp_path / "a2.csv").read_text().split() == ["1.5", "4", "4.5"]
    assert given["devices"] is None and given["precision"] == "auto"
    with pytest.raises(SystemExit):
        app(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "Steps of an average, the first of which is left out." in shown
    with pytest.raises(UsageError, match="--window 0 has to be at least 1"):
        series_job.average([folder], tmp_path / "out", window=0)
