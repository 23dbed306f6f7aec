"""Ways to upscale an image, side by side."""

import numpy as np
import pytest

from lowtide import ImageError, UsageError
from lowtide.jobs.bench_upscale import BASELINE, REFERENCE, VARIANTS, bench, image_difference
from lowtide.jobs.upscale_settings import UpscaleSettings


def test_every_way_is_one_of_upscale():
    assert len({way.name for way in VARIANTS}) == len(VARIANTS)
    for way in VARIANTS:
        UpscaleSettings.of(**way.settings)
    words = {way.name: way.options for way in VARIANTS}
    assert words[REFERENCE] == "none"
    assert words["speed"] == "--precision bf16 --streams 2 --tile-batch-size 4"
    assert words["tiles, not blended"] == "--tile 256 --no-hann-blend"


@pytest.mark.slow
def test_rows_state_cost_and_error_of_each_strategy(tmp_path, source):
    reported, picture = [], tmp_path / "bench.svg"
    report = bench(
        source,
        budget="512MiB",
        only=["memory"],
        plot=picture,
        progress=reported.append,
        device="cpu",
    )
    rows = {row.variant.name: row for row in report.rows}
    assert list(rows) == reported == [REFERENCE, "memory", BASELINE]
    assert (report.width, report.height) == (120, 100)
    for row in rows.values():
        assert not row.error
        assert row.wall_s > 0
        assert 0 < row.cpu_utilization <= 1.5
        assert row.peak_bytes > 0
        assert row.execution == "exact"  # the model's reach is less than tiles share
    assert rows[BASELINE].speedup == 1.0
    assert rows[REFERENCE].psnr_db is None
    assert rows["memory"].precision == "bf16"
    assert 30 < rows["memory"].psnr_db < 80
    assert 0 < rows["memory"].max_error < 20
    assert picture.read_text().lstrip().startswith("<?xml")


@pytest.mark.slow
def test_a_way_that_is_not_possible_says_why(source):
    report = bench(source, budget="8MiB", only=["whole"], device="cpu")
    whole = next(row for row in report.rows if row.variant.name == "whole")
    assert "no plan fits in 8.00 MiB" in whole.error
    assert whole.speedup is None


def test_what_cannot_be_run_is_refused_at_once(source, tmp_path):
    with pytest.raises(UsageError, match="'fastest'") as caught:
        bench(source, only=["fastest"])
    assert "conservative" in caught.value.hint
    with pytest.raises(UsageError, match=r"not written as \.unknown"):
        bench(source, plot=tmp_path / "bench.unknown")
    with pytest.raises(UsageError, match="this output is the input"):
        bench(source, plot=source)
    with pytest.raises(ImageError):
        bench(tmp_path / "none.png")


def test_the_error_between_two_files(tmp_path, save):
    one = np.full((4, 5, 3), 100, np.uint8)
    other = one.copy()
    other[0, 0, 0] = 110
    first, second = save(tmp_path / "a.png", one), save(tmp_path / "b.png", other)
    assert image_difference(first, first) == (None, 0)
    psnr, largest = image_difference(first, second)
    assert largest == 10
    assert psnr == pytest.approx(20 * np.log10(255 / np.sqrt(100 / 60)), abs=0.01)
