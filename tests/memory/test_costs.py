"""Costs: what probes measured, as a function of size."""

import pytest

from lowtide.core.heap import MMAP_THRESHOLD_BYTES
from lowtide.core.units import MIB
from lowtide.memory.costs import (
    BLOCK_SIZES,
    ModelCosts,
    ProbePoint,
    ReusedBlockBytes,
    TracedPoint,
    fit_growth,
)


def pairs(law, sides=(64, 128, 256, 512)):
    return [(side * side, int(law(side * side))) for side in sides]


def costs(law, seconds=lambda pixels: pixels * 1e-6, sides=(64, 128, 256, 512)):
    points = [
        ProbePoint(pixels=n, peak_bytes=count, resident_bytes=int(count * 1.2), seconds=seconds(n))
        for n, count in pairs(law, sides)
    ]
    return ModelCosts(
        sha256="0",
        device="cpu",
        precision="fp32",
        weight_bytes=10,
        channels_last=False,
        batchable=True,
        receptive_field=4,
        receptive_field_search_limit=31,
        points=tuple(points),
    )


def test_a_line_is_found():
    assert fit_growth(pairs(lambda n: 1000 + 400 * n)) == pytest.approx((1000, 400, 0))


def test_a_parabola_is_found():
    fixed, linear, square = fit_growth(pairs(lambda n: 5000 + 300 * n + 0.01 * n * n))
    assert (fixed, linear, square) == pytest.approx((5000, 300, 0.01), rel=1e-3)


def test_a_slight_bend_is_a_line():
    """Rounded buffers must not be taken for attention, which would explode when extrapolated."""
    points = pairs(lambda n: 400 * n)
    points[-1] = points[-1][0], int(points[-1][1] * 1.03)
    assert fit_growth(points)[2] == 0


def test_nothing_is_negative():
    for points in ([(10, 500), (20, 400)], [(10, 10), (20, 100), (40, 110)], [(10, 1), (20, 90)]):
        assert min(fit_growth(points)) >= 0


@pytest.mark.parametrize("law", [lambda n: 1e6 + 408 * n, lambda n: 300 * n + 0.01 * n * n])
def test_bytes_between_and_beyond_the_probes(law):
    known = costs(law)
    for side in (256, 300, 512, 2000):
        assert known.activation_bytes(side * side) == pytest.approx(law(side * side), rel=1e-3)


def test_less_than_a_smaller_probe_is_never_expected():
    known = costs(lambda n: 5e7 if n == 64 * 64 else 100 * n)
    assert known.activation_bytes(65 * 65) == 5e7


def test_slack_is_what_stays_resident_beyond_what_lives():
    known = costs(lambda n: 1000 * n)
    assert known.slack_bytes(10**6) == pytest.approx(0.2 * 1000 * 10**6, rel=1e-3)


def traced(blocks, sides=(64, 128, 256)):
    """Costs of runs in which ``blocks(pixels)`` are all alive at the peak."""
    points = []
    for side in sides:
        sizes = blocks(side * side)
        below = [sum(size for size in sizes if size < limit) for limit in BLOCK_SIZES]
        reused = tuple(ReusedBlockBytes(at_run_peak=count, max_live=count) for count in below)
        points.append(TracedPoint(pixels=side * side, peak_bytes=sum(sizes), reused_blocks=reused))
    return costs(lambda n: 1000 * n).model_copy(update={"traced_points": tuple(points)})


@pytest.mark.parametrize("side", [64, 90, 128, 200, 256, 500, 511])
def test_blocks_that_grow_are_reused_until_they_are_too_large(side):
    # Two of 64 bytes for a pixel: 16 MiB at 512 x 512.
    known = traced(lambda n: [64 * n] * 2).reused_blocks(side * side)
    assert known.max_live == known.at_run_peak == pytest.approx(2 * 64 * side * side)
    assert known.retained_bytes == pytest.approx(1.3 * known.max_live, rel=1e-6)


def test_blocks_too_large_for_the_heap_are_returned():
    known = traced(lambda n: [64 * n] * 2 + [n], sides=(64, 512, 1024))
    for side in (600, 1024, 2000):
        assert known.reused_blocks(side * side).max_live == pytest.approx(side * side)


def test_parts_of_one_size_stay_as_they_are():
    known = traced(lambda n: [10 * MIB] * 3)
    for side in (64, 100, 256, 1000):
        assert known.reused_blocks(side * side).max_live == pytest.approx(30 * MIB)
    assert traced(lambda n: [MMAP_THRESHOLD_BYTES] * 3).reused_blocks(100 * 100).retained_bytes == 0


def test_blocks_are_unknown_without_a_trace():
    assert costs(lambda n: n).reused_blocks(100) is None
    plain = TracedPoint(pixels=64, peak_bytes=100, reused_blocks=())
    assert (
        costs(lambda n: n).model_copy(update={"traced_points": (plain,)}).reused_blocks(100) is None
    )


def test_seconds_go_through_the_probes():
    known = costs(lambda n: n, seconds=lambda n: 2e-6 * n)
    for pixels in (64 * 64, 100 * 100, 512 * 512):
        assert known.seconds(pixels) == pytest.approx(2e-6 * pixels)


def test_a_disturbed_probe_raises_no_size_above_its_neighbors():
    quiet = costs(lambda n: n, seconds=lambda n: 2e-6 * n)
    disturbed = costs(lambda n: n, seconds=lambda n: (3e-6 if n == 256**2 else 2e-6) * n)
    for side in (64, 100, 200, 256, 300, 512, 4000):
        assert disturbed.seconds(side * side) == pytest.approx(quiet.seconds(side * side))


def test_sizes_between_may_be_the_fastest():
    known = costs(lambda n: n, seconds=lambda n: (1e-6 if n == 128**2 else 2e-6) * n)
    assert known.seconds(128**2) == pytest.approx(1e-6 * 128**2)


def test_seconds_grow_with_size_and_small_sizes_have_fixed_costs():
    known = costs(lambda n: n, seconds=lambda n: 1e-3 + 1e-6 * n)
    assert known.seconds(1) == known.points[0].seconds
    spent = [known.seconds(side * side) for side in (64, 90, 128, 300, 512, 700, 1500, 4000)]
    assert spent == sorted(spent)
    # What lies far beyond the probes is not promised to be as fast.
    assert known.seconds(4000**2) > 1.2 * known.points[-1].seconds * (4000 / 512) ** 2
