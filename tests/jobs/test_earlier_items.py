"""What earlier items of a job hold, and by how much they went over, counts for the next ones."""

import mmap
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import lowtide
from lowtide.jobs.engine.pipeline import JobPipeline
from lowtide.jobs.engine.results import ResultRecorder
from lowtide.media.discover import discover_files
from lowtide.memory.meter import open_meter
from support import series_job

MIB = 1 << 20
HELD, EXCESS = "held before the run", "excess of earlier runs"


class LeakyJob(series_job.AverageJob):
    """Takes 24 MiB in addition to its plan; ``kept`` says how many items go on holding it."""

    kept: int = 0
    blocks: list[np.ndarray]

    def plan(self, item):
        planned = super().plan(item)
        sizes = planned.plan.image.model_copy(update={"padded_width": 100 + item.index})
        return replace(planned, plan=planned.plan.model_copy(update={"image": sizes}))

    def run(self, item, planned, pipeline, queue_bytes):
        # not of the C heap, which may hold as much that is free
        memory = mmap.mmap(-1, 24 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        block = np.frombuffer(memory, np.uint8)
        block[:] = 1
        if item.index <= self.kept:
            self.blocks.append(block)
        return super().run(item, planned, pipeline, queue_bytes)


@pytest.fixture
def run_leaky(tmp_path):
    """The reports of three series, of which ``kept`` leave memory behind."""

    def run(kept):
        folder = tmp_path / "in"
        folder.mkdir()
        for name in "abc":
            (folder / f"{name}.csv").write_text("1\n2\n6\n3\n")
        found = discover_files([str(folder)], tmp_path / "out", kind=series_job.SERIES)
        settings = series_job.AverageSettings.of(budget="1GiB")
        job = LeakyJob(settings, settings.parse_budget("cpu", tmp_path))
        job.kept, job.blocks = kept, []
        report = series_job.AverageReport()
        results = ResultRecorder(found.pairs, report, None, "", force=False, sidecar=False)
        meter = open_meter("cpu")
        meter.start()
        try:
            JobPipeline(job, results, meter, count=3).run(results.due_items())
        finally:
            meter.stop()
        return report.series

    return run


def rows_of(item):
    return {row.name: row for row in item.memory.ledger}


def test_a_run_over_its_bound_says_so_and_widens_the_next_bounds(run_leaky):
    first, second, third = run_leaky(kept=0)
    over = first.memory.peak_bytes - first.memory.upper_bytes
    assert over > 20 * MIB
    (event,) = first.events
    assert event.startswith("over at most by 2") and "later items" in event
    assert EXCESS not in rows_of(first)
    assert rows_of(second)[EXCESS].upper == over and rows_of(second)[EXCESS].value == 0
    for item in (second, third):
        # The same run within what is now known, to the noise of small runs.
        assert item.memory.upper_bytes >= over
        assert item.memory.peak_bytes - item.memory.upper_bytes < 2 * MIB


def test_what_an_item_leaves_is_in_the_ledger_of_the_next(run_leaky):
    items = run_leaky(kept=2)
    held = [rows_of(item)[HELD].value if HELD in rows_of(item) else 0 for item in items]
    assert held[0] == 0
    for count, bytes_held in enumerate(held):
        assert abs(bytes_held - count * 24 * MIB) < 2 * MIB
    for item in items:
        extra = item.memory.predicted_bytes - item.plan.predicted_bytes
        assert extra == rows_of(item)[HELD].value if HELD in rows_of(item) else extra == 0


@pytest.mark.own_process
def test_a_folder_that_leaves_too_little_is_planned_for_what_is_left(tmp_path, save, crop):
    """A budget of just the largest bound: what the first images hold makes later plans smaller."""
    folder = tmp_path / "in"
    for index, (height, width) in enumerate([(60, 96), (96, 60), (72, 80), (80, 72)]):
        save(folder / f"{index}.png", crop[:height, :width])
    plans = lowtide.plan(folder, tmp_path / "none", budget="1GiB", strategy="whole").images
    needed = max(image.plan.upper_bytes for image in plans)
    report = lowtide.upscale(folder, tmp_path / "out", budget=needed, streams=1)
    told = [image for image in report.images if any("earlier" in one for one in image.events)]
    assert len(told) == 1  # said once
    assert all(image.memory.peak_bytes <= needed for image in report.images)
    for earlier, image in pairwise(report.images[report.images.index(told[0]) :]):
        assert image.plan.upper_bytes < needed - rows_of(earlier)[HELD].upper
        assert Path(image.output).exists()
