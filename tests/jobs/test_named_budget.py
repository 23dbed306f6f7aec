"""The smallest budget that an error names: kept by the command line, whatever the content."""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from lowtide.core.units import MIB
from lowtide.media import EncodeOptions
from support.media_files import write_image


def run(folder, *words):
    """A run of the command line in a process of its own, with an empty cache, as JSON."""
    done = subprocess.run(
        [sys.executable, "-m", "lowtide", *map(str, words), "--force", "--json"],
        capture_output=True,
        text=True,
        env={**os.environ, "LOWTIDE_CACHE": str(folder / "cache")},
    )
    return json.loads(done.stdout)


def noise(height, width, channels):
    """Pixels of 0 and full scale, which compress worst."""
    return 255 * np.random.default_rng(0).integers(0, 2, (height, width, channels), np.uint8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("suffix", "channels", "options"),
    [
        (".webp", 3, []),
        (".webp", 3, ["--webp-quality", "100"]),
        (".webp", 4, []),
        (".webp", 3, ["--webp-lossless"]),
        (".avif", 3, []),
    ],
)
def test_a_format_that_is_coded_as_a_whole(tmp_path, suffix, channels, options):
    source = tmp_path / f"in{suffix}"
    fast = EncodeOptions(avif_effort=0)
    write_image(source, noise(600, 900, channels), options=fast)
    words = ["upscale", source, "-o", tmp_path / f"out{suffix}", *options, "--budget"]
    smallest = run(tmp_path, *words, "1MiB")["error"]["smallest_bytes"]
    (image,) = run(tmp_path, *words, smallest)["images"]
    assert image["status"] == "done"
    assert smallest / 2.5 < image["memory"]["peak_bytes"] <= smallest


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["x264", "x265", "svtav1"])
def test_the_encoder_of_a_video(tmp_path, codec):
    av = pytest.importorskip("av")
    source, target = tmp_path / "in.mkv", tmp_path / "out.mkv"
    with av.open(str(source), "w") as container:
        stream = container.add_stream("ffv1", rate=24)
        stream.width, stream.height, stream.pix_fmt = 160, 120, "yuv420p"
        for _ in range(60):
            frame = av.VideoFrame.from_ndarray(noise(120, 160, 3), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    words = ["video", source, "-o", target, "--codec", codec, "--budget"]
    error = run(tmp_path, *words, "1MiB")["error"]
    smallest = error["smallest_bytes"]
    of_it = re.search(r"up to ([\d.]+) MiB of it are the encoder's", error["hint"])
    assert of_it and float(of_it[1]) * MIB < smallest
    (video,) = run(tmp_path, *words, smallest)["videos"]
    assert video["status"] == "done"
    assert video["memory"]["peak_bytes"] <= smallest
