"""`lowtide bench upscale`: ways to upscale an image, side by side."""

import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest


def test_a_row_for_each_way(lowtide, source):
    shown = lowtide("bench", "upscale", source, "--only", "lowtide", "--device", "cpu")
    assert shown.code == 0
    assert shown.err == "running lowtide\nrunning conservative\n"
    head, reference, baseline = shown.out.splitlines()
    assert "peak" in head
    assert reference.split()[0] == "lowtide"
    assert baseline.split()[0] == "conservative"
    assert "identical" in reference
    assert "1.00×" in baseline
    assert all(word in baseline for word in (" s ", "iB ", "tiled", ", fp32"))


@pytest.mark.slow
def test_rows_state_cost_and_error(lowtide, tmp_path, save, photo):
    picture = save(tmp_path / "photo.png", photo[:, :300])
    report = lowtide("bench", "upscale", picture, "--device", "cpu", "--json").json
    assert report["image"] == str(picture)
    assert "torch" in report["versions"]
    rows = {row["name"]: row for row in report["rows"]}
    strategies, in_bf16 = ("whole", "streamed", "tiled"), ("balanced", "aggressive", "maximum")
    assert list(rows) == ["lowtide", "conservative", *strategies, "default", *in_bf16]
    for row in rows.values():
        assert all(row[figure] > 0 for figure in ("seconds", "cpu_seconds", "peak_bytes"))
        assert row["speedup"] == round(rows["conservative"]["seconds"] / row["seconds"], 2)
    for name in strategies:
        assert rows[name]["strategy"]["name"] == name
        # Within its reach no tile or band of this model differs, but kernels may round differently.
        assert rows[name]["execution"] == "exact"
        assert rows[name]["max_error"] <= 1
    assert rows["lowtide"]["psnr_db"] is None
    # One of the strategies is what is chosen, and is not run again.
    chosen = rows["lowtide"]["strategy"]["name"]
    assert rows[chosen]["same_as"] == rows["default"]["same_as"] == "lowtide"
    assert rows[chosen]["seconds"] == rows["lowtide"]["seconds"]
    assert {rows[name]["precision"] for name in in_bf16} == {"bf16"}
    assert 30 < rows["balanced"]["psnr_db"] < 80
    assert 0 < rows["balanced"]["max_error"] < 20


@pytest.mark.slow
def test_a_way_that_is_not_possible_says_why(lowtide, source):
    words = ["--only", "whole", "--budget", "1MiB", "--device", "cpu"]
    shown = lowtide("bench", "upscale", source, *words)
    assert shown.code == 0
    lines = shown.out.splitlines()[1:]
    names = ["lowtide", "conservative", "whole"]
    assert [line.split()[:2] for line in lines] == [[name, "refused:"] for name in names]
    assert all("no plan fits in 1.00 MiB" in line for line in lines)


def test_what_cannot_be_run_is_refused_at_once(lowtide, source, tmp_path):
    for words, message in (
        ([source, "--only", "fastest"], "there is no way 'fastest'"),
        ([source, "--model", "nothing"], "no model"),
        ([source, "--seams"], "No such option"),
        ([tmp_path / "none.png"], "no such file"),
    ):
        result = lowtide("bench", "upscale", *words, "--device", "cpu", "--json")
        assert result.code == 2
        assert message in result.json["error"]["message"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_ctrl_c_ends_the_run(source):
    command = [sys.executable, "-m", "lowtide", "bench", "upscale", str(source)]
    bench = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    children = Path(f"/proc/{bench.pid}/task/{bench.pid}/children")
    assert bench.stderr is not None
    assert bench.stderr.readline() == "running lowtide\n"
    while not (found := children.read_text().split()):
        time.sleep(0.01)
    time.sleep(0.5)
    bench.send_signal(signal.SIGINT)
    assert "interrupted" in bench.communicate(timeout=60)[1]
    assert bench.returncode == 130
    line = Path(f"/proc/{found[0]}/cmdline")  # empty once it is dead and not yet waited for
    with contextlib.suppress(OSError):
        for _ in range(100):
            if not line.read_bytes():
                break
            time.sleep(0.1)
        else:
            pytest.fail("the run goes on")
