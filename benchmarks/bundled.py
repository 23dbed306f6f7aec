"""The bundled models: images they never saw, and their speed against similar networks.

    python benchmarks/bundled.py [--only TEXT] [--pairs 7] [--fresh]

PSNR-Y in dB of scikit-image's and matplotlib's images that no bundled model was trained or tuned
on, each downscaled by an antialiased cubic filter, compared with cubic upscaling; Set5 has a
benchmark of its own. An image in which each pixel is stored twice, across and down, is reduced to
single pixels, since upscaling it well would mean drawing squares; its score as stored is reported
too. Then, for each scale, one image whole through each network in alternating runs, in fp32:
processor seconds of one process whose heap keeps freed blocks, peaks of fresh ones whose heap
returns them. Compact and SPAN have random weights, and the width or depth whose number of weights
is nearest to the larger bundled model's.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import HEAP_KEEPS, ResultFile, ratio_of, row_parser, seconds_in_turns
from set5 import by_model
from streaming_models import spandrel_class
from subprocess_run import measure_in_subprocess
from torch import nn

from lowtide.core.metrics import psnr_y
from lowtide.models.resample import resize_cubic

SIDE, SCALES = 256, (2, 4)
OURS = ("lowtide-large-x{}", "lowtide-x{}")
PEERS = ("Compact", "SPAN")
# Which package's own file each is.
PICTURES = {
    "cell": "skimage",
    "clock_motion": "skimage",
    "microaneurysms": "skimage",
    "moon": "skimage",
    "page": "skimage",
    "retina": "skimage",
    "text": "skimage",
    "grace_hopper": "matplotlib",
}


def picture(name: str) -> np.ndarray:
    """uint8 (H, W, 3)."""
    import matplotlib
    import pyvips
    import skimage.data

    folder = {
        "skimage": Path(skimage.data.__file__).parent,
        "matplotlib": Path(matplotlib.get_data_path()) / "sample_data",
    }[PICTURES[name]]
    path = next(path for path in sorted(folder.glob(f"{name}.*")) if path.suffix != ".npz")
    image = pyvips.Image.new_from_file(str(path)).colourspace("srgb").numpy()
    return np.ascontiguousarray(image[..., :3])


def once(image: np.ndarray) -> np.ndarray:
    """A picture with each pixel once, if all of them are there twice across and down."""
    small = image[::2, ::2]
    return small if np.array_equal(image, small.repeat(2, 0).repeat(2, 1)) else image


def scored(model: str, scale: int) -> dict[str, Any]:
    """PSNR-Y of each picture, and that of cubic enlargement."""
    import lowtide

    enlarge, own, cubic, stored = by_model(lowtide.load(model)), {}, {}, {}
    for name in PICTURES:
        as_stored = picture(name)
        high = once(as_stored)
        own[name], cubic[name] = enlarged_db(enlarge, high, scale)
        if high is not as_stored:
            stored[name] = enlarged_db(enlarge, as_stored, scale)
    return {
        "model": model,
        "scale": scale,
        "pictures_db": own,
        "cubic_db": cubic,
        "as_stored_db": stored,
        "mean_db": round(float(np.mean([*own.values()])), 3),
        "above_cubic_on_all": all(own[name] > cubic[name] for name in PICTURES),
    }


def enlarged_db(
    enlarge: Callable[[np.ndarray, int], np.ndarray], high: np.ndarray, scale: int
) -> tuple[float, float]:
    """PSNR-Y of a picture shrunk and enlarged again, and of cubic enlargement."""
    height, width = (side // scale for side in high.shape[:2])
    high = high[: height * scale, : width * scale]
    low = resize_cubic(high, height, width)
    made = enlarge(low, scale), resize_cubic(low, *high.shape[:2])
    own, cubic = (round(psnr_y(one, high, scale), 3) for one in made)
    return own, cubic


def weights_of(network: nn.Module) -> int:
    """Number of weights."""
    return sum(one.numel() for one in network.parameters())


def peer(name: str, scale: int, wanted: int) -> nn.Module:
    """A network of that kind whose weights are nearest in number to ``wanted``."""
    from lowtide.models.spandrel_files import fold_convs

    def compact(size: int) -> nn.Module:
        return spandrel_class(
            "Compact", "__arch.SRVGG", "SRVGGNetCompact", upscale=scale, num_feat=64, num_conv=size
        )

    def span(size: int) -> nn.Module:
        return fold_convs(
            spandrel_class(
                "SPAN",
                "__arch.span",
                "SPAN",
                num_in_ch=3,
                num_out_ch=3,
                upscale=scale,
                feature_channels=size,
            ).eval()
        )

    make, sizes = {"Compact": (compact, range(2, 17)), "SPAN": (span, range(16, 65, 2))}[name]
    torch.manual_seed(0)
    best = min(sizes, key=lambda size: abs(weights_of(make(size)) - wanted))
    return make(best).eval().requires_grad_(False)


def network_of(name: str, scale: int) -> nn.Module:
    """One of those compared."""
    import lowtide

    if name in PEERS:
        return peer(name, scale, weights_of(lowtide.load(OURS[0].format(scale)).module))
    return lowtide.load(name).module


_ready: dict[tuple[str, int], nn.Module] = {}


def run_once(name: str, scale: int) -> None:
    """One run; the first call, which is not measured, makes the network."""
    side = SIDE
    if (name, scale) not in _ready:
        _ready[name, scale], side = network_of(name, scale), SIDE // 4
    with torch.inference_mode():
        _ready[name, scale](torch.rand(1, 3, side, side))


def run_times(scale: int, pairs: int) -> dict[str, Any]:
    """Processor seconds of each network in turns; the first round warms up."""
    names = [*(name.format(scale) for name in OURS), *PEERS]
    networks = {name: network_of(name, scale) for name in names}
    image = torch.rand(1, 3, SIDE, SIDE)
    runs = {name: functools.partial(network, image) for name, network in networks.items()}
    with torch.inference_mode():
        seconds = seconds_in_turns(runs, pairs)
    return {
        "cpu_s": seconds,
        "threads": torch.get_num_threads(),
        "parameters": {name: weights_of(network) for name, network in networks.items()},
    }


def measured(scale: int, pairs: int) -> dict[str, Any]:
    """Speed and peak of one scale."""
    timed = measure_in_subprocess("bundled:run_times", scale, pairs, env=HEAP_KEEPS).result
    own = timed["cpu_s"][OURS[0].format(scale)]
    peaks = {
        name: measure_in_subprocess("bundled:run_once", name, scale, warmups=1).peak_bytes
        for name in timed["cpu_s"]
    }
    ratios = {name: ratio_of(taken, own) for name, taken in timed["cpu_s"].items()}
    return {"scale": scale, "side": SIDE, **timed, "ratio": ratios, "peak_bytes": peaks}


def main() -> None:
    """Measure what is missing."""
    options = row_parser(__doc__, pairs=7).parse_args()
    results = ResultFile(
        "bundled",
        fresh=options.fresh,
        about="Bundled models on pictures they never saw, and beside nets of like size.",
    )
    for scale in SCALES:
        todo = {
            f"{model.format(scale)}, pictures": lambda m=model, s=scale: scored(m.format(s), s)
            for model in OURS
        }
        todo[f"×{scale}, speed"] = lambda s=scale: measured(s, options.pairs)
        for name, measure in todo.items():
            if options.only in name and not results.has(name):
                results.add(name, **measure())


if __name__ == "__main__":
    sys.exit(main())
