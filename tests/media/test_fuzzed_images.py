"""Damaged images are read to their end or refused by name, in the predicted memory."""

import tempfile
from collections import Counter
from pathlib import Path

import pytest

from lowtide import LowtideError
from lowtide.core.units import MIB
from lowtide.media import inspect_image, open_image, open_sink
from lowtide.memory.meter import HostMemoryMeter
from support.fuzz_workers import run_all
from support.media_fuzz import KINDS, fuzzed

# What a job on a small machine would allow a picture to take: others it refuses.
BUDGET = 512 * MIB
# Pages of libraries that are touched for the first time, and what a heap keeps.
SLACK = 24 * MIB


def become_of(case: tuple[str, int | None]) -> str:
    """How a damaged picture ends: ``"read"``, ``"too much"`` of the budget, or its refusal."""
    kind, seed = case
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"a.{kind}"
        path.write_bytes(fuzzed(kind, seed))
        meter = HostMemoryMeter()
        meter.start()
        predicted = 0
        try:
            facts = inspect_image(path)
            predicted = facts.resident_bytes
            if predicted + facts.info.row_bytes * 16 + facts.scratch_bytes > BUDGET:
                return "too much"
            return _copied(path, Path(folder))
        except LowtideError as error:
            return f"{type(error).__name__}: {error.message}"
        finally:
            taken = meter.lap().corrected_peak_bytes
            meter.stop()
            if taken > predicted + SLACK:
                raise AssertionError(f"{taken >> 20} MiB where {predicted >> 20} were predicted")


def _copied(path: Path, folder: Path) -> str:
    """Read to the end, and written as a file that has its metadata too."""
    with open_image(path, scratch_dir=folder) as source:
        target = folder / ("b.png" if source.info.alpha else "b.jpg")
        small = source.info.pixels < 1 << 22
        sink = open_sink(target, source.info, metadata=source.metadata) if small else None
        for top in range(0, source.info.height, 16):
            rows = source.read(top, top + 16)
            if sink is not None:
                sink.write(top, rows)
        if sink is not None:
            sink.commit()
    return "read"


def ends_of(cases: list[tuple[str, int | None]]) -> dict[tuple[str, int | None], str]:
    outcomes = run_all(become_of, cases, seconds=30)
    assert not {outcome.case: outcome.fault for outcome in outcomes if outcome.fault}
    return {outcome.case: outcome.result for outcome in outcomes}


@pytest.mark.parametrize("seeds", [8, pytest.param(100, marks=pytest.mark.slow)])
def test_damaged_images_are_read_or_refused(seeds):
    ends = ends_of([(kind, seed) for kind in KINDS for seed in range(seeds)])
    # The corpus is worth something: of each format, some are read and some are not.
    counts = Counter((kind, end == "read") for (kind, _), end in ends.items())
    for kind in KINDS:
        assert counts[kind, True] >= seeds // 20, counts
        assert counts[kind, False] >= seeds // 5, counts


def test_a_header_with_a_false_size_takes_no_memory():
    ends = ends_of([(kind, None) for kind in KINDS])
    assert "read" not in ends.values()
    # Formats that are decoded as a whole would take it, which is known beforehand.
    assert ends["avif", None] == "too much"
