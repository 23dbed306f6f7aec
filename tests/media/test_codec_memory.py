from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lowtide.media import EncodeOptions, inspect_image, output_cost
from lowtide.media.image_info import ImageInfo
from support.media_files import make_rows, write_image

_READ = """
import re, sys
from lowtide.media import inspect_image, open_image
def peak(name):
    text = open("/proc/self/status").read()
    return int(re.search(name + r":\\s+(\\d+)", text).group(1)) * 1024
def run(path):
    with open_image(path) as source:
        for top in range(0, source.info.height, 16): source.read(top, top + 16)
run(sys.argv[1])
open("/proc/self/clear_refs", "w").write("5")
before = peak("VmRSS")
run(sys.argv[2])
print(peak("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures with /proc")
@pytest.mark.parametrize("suffix", [".png", ".jpg", ".webp", ".avif", ".tif"])
def test_reading_stays_under_its_estimate(tmp_path: Path, suffix: str) -> None:
    options = EncodeOptions(avif_effort=0, avif_quality=50, png_compression=1)
    small = write_image(tmp_path / f"s{suffix}", make_rows(64, 64, 3), options=options)
    large = write_image(
        tmp_path / f"l{suffix}", make_rows(1100, 1300, 3), options=options, step=100
    )
    done = subprocess.run(
        [sys.executable, "-c", _READ, str(small), str(large)],
        capture_output=True,
        text=True,
        check=True,
    )
    read_bytes = 16 * 1300 * 3
    assert int(done.stdout) <= inspect_image(large).resident_bytes + 2 * read_bytes


def test_formats_that_are_written_by_rows_do_not_cost_by_height() -> None:
    for name in ("a.png", "a.jpg", "a.tif"):
        low = output_cost(name, ImageInfo(4000, 4000, 3))
        assert low == output_cost(name, ImageInfo(4000, 40_000, 3))
        assert low.resident_bytes < 60 << 20


def test_formats_that_are_written_whole_cost_by_pixels() -> None:
    for name in ("a.webp", "a.avif"):
        low = output_cost(name, ImageInfo(4000, 2000, 3))
        high = output_cost(name, ImageInfo(4000, 4000, 3))
        assert high.resident_bytes - low.resident_bytes > 4000 * 2000 * 7
        assert "as a whole" in high.reason


def test_typical_bytes_are_below_the_bound(tmp_path: Path) -> None:
    png, webp = (output_cost(name, ImageInfo(4000, 4000, 3)) for name in ("a.png", "a.webp"))
    for cost in (png, webp):
        assert 0 < cost.typical_bytes < cost.resident_bytes
    assert webp.typical_bytes > 10 * png.typical_bytes
    facts = inspect_image(write_image(tmp_path / "a.jpg", make_rows(64, 64, 3)))
    assert 0 < facts.typical_bytes < facts.resident_bytes


def test_resizing_and_alpha_cost_more() -> None:
    rgb, rgba = ImageInfo(4000, 3000, 3), ImageInfo(4000, 3000, 4)
    plain = output_cost("a.png", rgb).resident_bytes
    assert output_cost("a.png", rgb, resized_from=rgb).resident_bytes > plain
    lossy = [output_cost("a.webp", info, EncodeOptions()).resident_bytes for info in (rgb, rgba)]
    assert lossy[0] < lossy[1]


_WRITE = """
import sys
import numpy as np
from lowtide.media.image_info import ImageInfo
from lowtide.media import open_sink, output_cost
from lowtide.memory.meter import HostMemoryMeter
def write(path, width, height):
    rows = np.zeros((16, width, 3), np.uint8)
    with open_sink(path, ImageInfo(width, height, 3)) as sink:
        for top in range(0, height, 16): sink.write(top, rows)
        sink.commit()
write(sys.argv[1] + "/warm.png", 64, 64)
meter = HostMemoryMeter()
meter.start()
write(sys.argv[1] + "/wide.png", 24000, 1600)
print(meter.lap().high_water_bytes, output_cost("a.png", ImageInfo(24000, 1600, 3)).resident_bytes)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="libvips' windows are only shrunk on Linux")
def test_a_wide_image_is_written_through_small_windows(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _WRITE, str(tmp_path)], capture_output=True, text=True, check=True
    )
    used, price = map(int, done.stdout.split())
    # With libvips' own windows it is 50 MiB and more.
    assert used <= price < 25 << 20


_NOISE = """
import sys
import numpy as np
from lowtide.core.heap import tune_heap
if sys.argv[4] == "tuned": tune_heap()
from lowtide.media import EncodeOptions, inspect_image, open_image, open_sink, output_cost
from lowtide.media.image_info import ImageInfo
from lowtide.memory.meter import HostMemoryMeter
folder, suffix, kind, _heap, width, height = sys.argv[1:]
channels = 4 if "alpha" in kind else 3
options = EncodeOptions(
    webp_quality=int(kind.split()[0]), avif_quality=int(kind.split()[0]),
    webp_lossless="lossless" in kind,
)
rng = np.random.default_rng(0)
def write(name, width, height):
    info = ImageInfo(width, height, channels)
    path = f"{folder}/{name}{suffix}"
    with open_sink(path, info, options=options) as sink:
        for top in range(0, height, 16):
            rows = (min(16, height - top), width, channels)
            full = 255 * rng.integers(0, 2, rows) if channels == 3 else rng.integers(0, 256, rows)
            sink.write(top, full.astype(np.uint8))
        sink.commit()
    return path, output_cost(path, info, options).resident_bytes
def read(path):
    with open_image(path) as source:
        for top in range(0, source.info.height, 16): source.read(top, top + 16)
    return inspect_image(path).resident_bytes
read(write("small", 64, 64)[0])
meter = HostMemoryMeter(sample_seconds=0.001)
meter.start()
path, written = write("large", int(width), int(height))
print(meter.lap().corrected_peak_bytes, written)
meter = HostMemoryMeter(sample_seconds=0.001)
meter.start()
decoded = read(path)
print(meter.lap().corrected_peak_bytes, decoded)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="measures with /proc")
@pytest.mark.parametrize("heap", ["tuned", "as it comes"])
@pytest.mark.parametrize(
    ("suffix", "kind", "size"),
    [
        (".webp", "90", (1300, 1100)),
        (".webp", "100", (1300, 1100)),
        (".webp", "90 alpha", (1300, 1100)),
        (".webp", "90 alpha", (700, 500)),
        (".webp", "90 lossless", (700, 500)),
        (".webp", "90 lossless alpha", (1300, 1100)),
        (".webp", "90 lossless alpha", (700, 500)),
        (".avif", "100", (1300, 1100)),
        (".avif", "80 alpha", (700, 500)),
    ],
)
def test_noise_stays_under_the_bound(
    tmp_path: Path, suffix: str, kind: str, size: tuple[int, int], heap: str
) -> None:
    """Of formats that are coded as a whole, whose coder takes more for what compresses badly."""
    done = subprocess.run(
        [sys.executable, "-c", _NOISE, str(tmp_path), suffix, kind, heap, *map(str, size)],
        capture_output=True,
        text=True,
        check=True,
    )
    for line in done.stdout.splitlines():
        used, bound = map(int, line.split())
        assert bound / 5 < used <= bound


def test_a_lossy_webp_takes_about_what_its_frame_and_planes_do() -> None:
    """13 MP of a photograph take 5.5 bytes a pixel: the bound is less than twice that."""
    info = ImageInfo(4400, 3000, 3)
    cost = output_cost("a.webp", info)
    assert cost.typical_bytes < 6.2 * info.pixels
    assert cost.resident_bytes < 9 * info.pixels
