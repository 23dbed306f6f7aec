"""First calls of a fitted autoencoder, and planning of streamed networks, in fresh processes.

    python benchmarks/first_calls.py [--fresh]

Processor seconds of one thread, imports of the model not counted, with an empty cache for each row.
The autoencoder has Stable Diffusion's shape and random weights, and decodes to 384×384. Its own
call is run first in each process, and gives the ratios; the peak is what a call adds to the
resident memory, polled every 2 ms. Networks are planned at 197×251, CRAFT at 128×128.

The last row is the command line's: CRAFT in bands for a picture of 128×128, its first use and a
later one. Their seconds are those of the whole process with its imports; `own` is the network's
call.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import ResultFile

SIDE, LATER_CALLS = 48, 2
# Above the peak of the autoencoder's own call, and half of that.
BUDGETS = "800MiB", "400MiB"
SPANDREL: dict[str, tuple[str, dict[str, Any]]] = {
    "ATD": ("atd_arch", {"depths": (2, 2), "num_heads": (6, 6), "upscale": 2}),
    "GRL": (
        "grl",
        {
            "depths": [2, 2],
            "num_heads_window": [3, 3],
            "num_heads_stripe": [3, 3],
            "upscale": 2,
            "upsampler": "pixelshuffle",
        },
    ),
    "CRAFT": ("CRAFT", {}),
    "OmniSR": ("OmniSR", {"res_num": 2, "block_num": 2, "up_scale": 2}),
}
# Heights and widths other than 197×251.
SIZES = {"CRAFT": (128, 128)}


def resident_bytes() -> int:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def measured(call: Callable[[], Any]) -> tuple[dict[str, float], Any]:
    """Processor seconds and added peak of a call, and its result."""
    base = peak = resident_bytes()
    done = threading.Event()

    def poll() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, resident_bytes())

    poller = threading.Thread(target=poll)
    poller.start()
    started = time.process_time()
    result = call()
    seconds = time.process_time() - started
    done.set()
    poller.join()
    return {"cpu_s": round(seconds, 2), "peak_mib": (peak - base) >> 20}, result


def decodes(budget: str) -> dict[str, Any]:
    """The autoencoder's own decode, and the first and later ones once it is fitted."""
    import torch
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

    import lowtide

    torch.manual_seed(0)
    options: dict[str, Any] = {
        "block_out_channels": (128, 256, 512, 512),
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "layers_per_block": 2,
        "sample_size": 4 * SIDE,
    }
    vae: Any = AutoencoderKL(**options).eval()
    latents = torch.randn(1, 4, SIDE, SIDE)

    def decode() -> Any:
        with torch.no_grad():
            return vae.decode(latents).sample

    own, wanted = measured(decode)
    lowtide.fit(vae, budget=budget)
    calls = [measured(decode) for _ in range(1 + LATER_CALLS)]
    row: dict[str, Any] = {"own": own}
    for name, (found, result) in zip(("first", "second", "third"), calls, strict=True):
        error = ((result - wanted).abs().max() / wanted.abs().max()).item()
        row[name] = {**found, "ratio": round(found["cpu_s"] / own["cpu_s"], 2), "error": error}
    return row


def network(name: str) -> Any:
    """Network of spandrel with random weights."""
    import importlib

    import torch

    file, options = SPANDREL[name]
    torch.manual_seed(0)
    module = importlib.import_module(f"spandrel.architectures.{name}.__arch.{file}")
    return getattr(module, name)(**options).eval()


def plans(name: str) -> dict[str, Any]:
    """Planning of a network in bands, and its own call."""
    import torch

    import lowtide

    model = network(name)
    image = torch.rand(1, 3, *SIZES.get(name, (197, 251)))
    with torch.no_grad():
        planning, _ = measured(lambda: lowtide.stream(model).prepare(image))
        own, _ = measured(lambda: model(image))
    return {"planning": planning, "own": own}


def upscales(name: str) -> dict[str, Any]:
    """First and later use of a network in bands by the command line, and its own call."""
    import numpy as np
    import pyvips
    import torch

    model, image = network(name), torch.rand(1, 3, *SIZES[name])
    with torch.no_grad():
        row: dict[str, Any] = {"own": measured(lambda: model(image))[0]}
    folder = Path(os.environ["LOWTIDE_CACHE"])
    torch.save(model.state_dict(), folder / "network.pth")
    pixels = (255 * image[0].permute(1, 2, 0).numpy()).astype(np.uint8)
    pyvips.Image.new_from_array(pixels).write_to_file(str(folder / "picture.png"))
    command = [sys.executable, "-m", "lowtide", "upscale", "picture.png", "-o", "large.png"]
    command += ["-m", "network.pth", "--strategy", "streamed", "--force"]
    for use in ("first", "later"):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
        row[use] = {"cpu_s": round(seconds, 2)}
    return row


def main() -> None:
    """Measure what is missing, each row in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fresh", action="store_true", help="drop earlier rows")
    parser.add_argument("--row", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    kinds = {"decode": decodes, "plan": plans, "upscale": upscales}
    if given.row:
        kind, which = given.row
        print(json.dumps(kinds[kind](which)))
        return
    results = ResultFile(
        "first_calls",
        fresh=given.fresh,
        packages=("diffusers",),
        about="First calls of a fitted autoencoder, and planning of streamed networks.",
    )
    rows = [*(("decode", budget) for budget in BUDGETS), *(("plan", name) for name in SPANDREL)]
    rows.append(("upscale", "CRAFT"))
    for kind, which in rows:
        if results.has(row := f"{kind} {which}"):
            continue
        with tempfile.TemporaryDirectory() as cache:
            done = subprocess.run(
                [sys.executable, __file__, "--row", kind, which],
                env={**os.environ, "LOWTIDE_CACHE": cache, "OMP_NUM_THREADS": "1"},
                check=True,
                capture_output=True,
                text=True,
            )
        results.add(row, **json.loads(done.stdout.splitlines()[-1]))


if __name__ == "__main__":
    main()
