"""Memory of the image codecs against their bounds: by content, size and options.

    python benchmarks/codec_memory.py [--only WebP] [--fresh]

Each row writes or reads one image in a process of its own, after a small image of the same kind.
Measured is the kernel's high-water mark of resident memory above what was before, as a share of the
bound that plans count with; of formats that encode the whole image at the end, that until the last
row too.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, cast

import numpy as np
from common import ResultFile, row_parser
from photographs import photograph

# "binary" is noise of 0 and full scale, the worst that there is for a lossy encoder. By whether a
# format is coded as a whole: others take about the same for all.
CONTENTS = {True: ("photograph", "noise", "binary"), False: ("photograph", "noise")}
SIZE = (1800, 1300)
# By name: suffix, options of the encoder, channels, sample type.
WRITTEN: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "PNG": (".png", {}, 3, "uint8"),
    "PNG 16 bits": (".png", {}, 3, "uint16"),
    "JPEG": (".jpg", {}, 3, "uint8"),
    "JPEG gray": (".jpg", {}, 1, "uint8"),
    "WebP": (".webp", {}, 3, "uint8"),
    "WebP q100": (".webp", {"webp_quality": 100}, 3, "uint8"),
    "WebP q95": (".webp", {"webp_quality": 95}, 3, "uint8"),
    "WebP q50": (".webp", {"webp_quality": 50}, 3, "uint8"),
    "WebP q100 alpha": (".webp", {"webp_quality": 100}, 4, "uint8"),
    "WebP lossless": (".webp", {"webp_lossless": True}, 3, "uint8"),
    "WebP alpha": (".webp", {}, 4, "uint8"),
    "WebP lossless alpha": (".webp", {"webp_lossless": True}, 4, "uint8"),
    "AVIF": (".avif", {}, 3, "uint8"),
    "AVIF alpha": (".avif", {}, 4, "uint8"),
    "AVIF q95": (".avif", {"avif_quality": 95}, 3, "uint8"),
    "AVIF q100": (".avif", {"avif_quality": 100}, 3, "uint8"),
    "AVIF effort 4": (".avif", {"avif_effort": 4}, 3, "uint8"),
    "AVIF q100 alpha": (".avif", {"avif_quality": 100}, 4, "uint8"),
    "AVIF 12 bits": (".avif", {}, 3, "uint16"),
    "TIFF": (".tif", {}, 3, "uint8"),
    "TIFF float": (".tif", {}, 3, "float32"),
    "TIFF LZW": (".tif", {"tiff_compression": "lzw"}, 3, "uint16"),
}
# Read only: by name, how libvips writes the file.
READ: dict[str, tuple[str, dict[str, Any]]] = {
    "progressive JPEG": ("jpg", {"interlace": True, "Q": 92}),
    "progressive JPEG 4:4:4": ("jpg", {"interlace": True, "Q": 92, "subsample_mode": "off"}),
    "interlaced PNG": ("png", {"interlace": True, "compression": 1}),
    "tiled TIFF": ("tif", {"tile": True, "tile_width": 256, "tile_height": 256}),
    "TIFF of one strip": ("tif", {"tile_height": 30_000, "compression": "deflate"}),
}
CHILD = r"""
import json, sys, time
order = json.loads(sys.argv[1])
if order["tuned"]:
    from lowtide.core.heap import tune_heap
    tune_heap()
import numpy as np
from lowtide.media import EncodeOptions, inspect_image, open_image, open_sink, output_cost
from lowtide.media.image_info import ImageInfo
from lowtide.memory.meter import HostMemoryMeter

ROWS = 16
options = EncodeOptions(**order["options"])

def write(target, pixels):
    info = ImageInfo(pixels.shape[1], pixels.shape[0], pixels.shape[2], str(pixels.dtype))
    with open_sink(target, info, options=options) as sink:
        for top in range(0, len(pixels), ROWS):
            # From a file that is mapped, so that the pixels are no anonymous memory.
            sink.write(top, np.array(pixels[top : top + ROWS]))
        time.sleep(0.1)  # the encoder's thread takes the rows from a pipe
        until_last = meter.lap()
        sink.commit()
    cost = output_cost(target, info, options)
    return cost, until_last.corrected_peak_bytes, cost.collecting and cost.collecting.upper

def read(source):
    with open_image(source) as opened:
        for top in range(0, opened.info.height, ROWS):
            opened.read(top, top + ROWS)
        return opened.facts, 0, None

def run(name):
    if order["reads"]:
        return read(name)
    return write(order["target"], np.load(name, mmap_mode="r"))

meter = HostMemoryMeter()
meter.start()
run(order["small"])
meter.stop()
meter = HostMemoryMeter(sample_seconds=0.001)
meter.start()
cost, until_last, until_last_bound = run(order["large"])
usage = meter.lap()
print(json.dumps([max(usage.corrected_peak_bytes, until_last), until_last, until_last_bound,
                  cost.resident_bytes, cost.typical_bytes]))
"""


def pixels_of(content: str, size: tuple[int, int], channels: int, sample: str) -> np.ndarray:
    """An image (H, W, C) of a photograph with a smooth alpha, or of noise."""
    width, height = size
    rng = np.random.default_rng(0)
    if content == "noise":
        values = rng.random((height, width, channels))
    elif content == "binary":
        values = rng.integers(0, 2, (height, width, channels)).astype(float)
    else:
        with tempfile.TemporaryDirectory() as folder:
            path = photograph(Path(folder) / "p.png", width, height)
            import pyvips

            color = np.asarray(pyvips.Image.new_from_file(str(path)))[..., :3] / 255
        alpha = np.linspace(0, 1, width)[None, :, None] * np.ones((height, 1, 1))
        values = np.concatenate([color, alpha], 2)[..., : channels if channels != 1 else 1]
    if sample == "float32":
        return values.astype(np.float32)
    full = 255 if sample == "uint8" else 65535
    return np.round(values * full).astype(sample)


def measured(order: dict[str, Any]) -> dict[str, Any]:
    """Run one child in both settings of the heap and return the higher peaks."""
    runs = []
    for tuned in (True, False):
        words = [sys.executable, "-c", CHILD, json.dumps({**order, "tuned": tuned})]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        runs.append(json.loads(done.stdout))
    peak, until_last = (max(run[place] for run in runs) for place in (0, 1))
    _, _, until_last_bound, bound, typical = max(runs, key=lambda run: run[3])
    row = {
        "peak_bytes": peak,
        "bound_bytes": bound,
        "typical_bytes": typical,
        "of_bound": round(max(run[0] / run[3] for run in runs), 3),
    }
    if until_last_bound is not None:
        row["until_last_row_bytes"] = until_last
        row["until_last_row_of_bound"] = round(until_last / until_last_bound, 3)
    return row


def write_file(pixels: np.ndarray, path: Path, how: dict[str, Any]) -> None:
    """Write ``pixels`` with libvips's own options, which Lowtide does not have."""
    import pyvips

    pyvips.Image.new_from_array(pixels).write_to_file(str(path), **how)


def rows_of(name: str, content: str, size: tuple[int, int], folder: Path) -> dict[str, Any]:
    """Measure writing, and reading what was written; reading alone for what Lowtide does not
    write."""
    from lowtide.media import EncodeOptions, open_sink
    from lowtide.media.image_info import ImageInfo, SampleType

    kinds = {"small": (64, 64), "large": size}
    order: dict[str, Any] = {"options": {}, "reads": True}
    row: dict[str, Any] = {"content": content, "megapixels": round(size[0] * size[1] / 1e6, 2)}
    if name in READ:
        suffix, how = READ[name]
        for kind, one in kinds.items():
            path = folder / f"{kind}.{suffix}"
            write_file(pixels_of(content, one, 3, "uint8"), path, how)
            order[kind] = str(path)
        return row | {"reading": measured(order)}
    suffix, options, channels, sample = WRITTEN[name]
    written = {"options": options, "reads": False, "target": str(folder / f"out{suffix}")}
    for kind, one in kinds.items():
        pixels = pixels_of(content, one, channels, sample)
        np.save(folder / f"{kind}.npy", pixels)
        written[kind] = str(folder / f"{kind}.npy")
        path = folder / f"{kind}{suffix}"
        info = ImageInfo(pixels.shape[1], pixels.shape[0], channels, cast(SampleType, sample))
        with open_sink(path, info, options=EncodeOptions(**options)) as sink:
            sink.write(0, pixels)
            sink.commit()
        order[kind] = str(path)
    return row | {"writing": measured(written), "reading": measured(order)}


def main() -> None:
    """Measure each row that is missing."""
    chosen = row_parser(__doc__).parse_args()
    results = ResultFile("codec_memory", fresh=chosen.fresh, about=(__doc__ or "").splitlines()[0])
    for name in (*WRITTEN, *READ):
        whole = name.startswith(("WebP", "AVIF"))
        for content in CONTENTS[whole]:
            row = f"{name}, {content}"
            if chosen.only in row and not results.has(row):
                with tempfile.TemporaryDirectory() as folder:
                    results.add(row, **rows_of(name, content, SIZE, Path(folder)))


if __name__ == "__main__":
    main()
