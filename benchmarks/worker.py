"""One measured run in a fresh process; prints one JSON line.

    python benchmarks/worker.py lowtide|denoise|tile_loop INPUT OUTPUT MODEL [OPTION=VALUE ...]

Memory is what the run adds to the process once the libraries are loaded, sampled every 5 ms,
together with the kernel's high-water mark; ``process_bytes`` is all that was resident, libraries
included; processor time is user + system of the run alone.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyvips
import torch
from padded_tiles import padded_tiles

import lowtide
from lowtide.core.heap import tune_heap
from lowtide.memory.meter import HostMemoryMeter, open_meter
from lowtide.memory.process_memory import status_bytes
from lowtide.streaming.planner.program_cache import import_capture_libraries

# Those that Real-ESRGAN's own documentation has.
TILE, PAD = 256, 10
PNG_COMPRESSION = 3


@torch.inference_mode()
def tile_loop(source: Path, target: Path, model_name: str, device: str) -> None:
    """`padded_tiles` with whole input and output in memory."""
    model = lowtide.load(model_name, device=device)
    pixels = pyvips.Image.new_from_file(str(source)).numpy()
    image = torch.from_numpy(pixels.astype(np.float32) / 255).permute(2, 0, 1)[None].to(device)
    output = padded_tiles(model.module, image, model.descriptor.scale, TILE, PAD)
    samples = (output[0].clamp_(0, 1).permute(1, 2, 0).cpu().numpy() * 255).round()
    encoded = pyvips.Image.new_from_array(samples.astype(np.uint8))
    encoded.pngsave(str(target), compression=PNG_COMPRESSION)


def main() -> None:
    """Run once and print the figures."""
    kind, source, target, model, *rest = sys.argv[1:]
    options: dict[str, Any] = dict(word.split("=", 1) for word in rest)
    device = options.pop("device", "cpu")
    if "sigma" in options:
        options["sigma"] = float(options["sigma"])
    if options.pop("tuned", "yes") == "yes":
        tune_heap()  # as the command line does
    # Both load what they need before the meter starts; kernels are warmed by neither.
    lowtide.load(model)
    if options.get("strategy") == "streamed":
        import_capture_libraries()
    extra: dict[str, object] = {}
    high_water = None
    meter = HostMemoryMeter(0.005) if device == "cpu" else open_meter(device)
    meter.start()
    wall, cpu = time.perf_counter(), time.process_time()
    if kind == "tile_loop":
        tile_loop(Path(source), Path(target), model, device)
    else:
        call = lowtide.denoise if kind == "denoise" else lowtide.upscale
        options |= {"png_compression": PNG_COMPRESSION, "force": True}
        report = call(source, target, model=model, device=device, **options)
        image = report.images[0]
        assert image.plan is not None
        assert image.memory is not None
        assert image.accuracy is not None
        # The job resets the kernel's mark for itself, so its own figure is the right one.
        high_water = image.memory.high_water_bytes
        extra = {
            "plan": image.plan.title,
            "accuracy": image.accuracy.execution,
            "predicted_bytes": image.memory.predicted_bytes,
            "upper_bytes": image.memory.upper_bytes,
            "reported_peak_bytes": image.memory.peak_bytes,
        }
    figures = {
        "wall_s": round(time.perf_counter() - wall, 2),
        "cpu_s": round(time.process_time() - cpu, 2),
    }
    usage = meter.lap()
    figures |= {
        "peak_bytes": usage.peak_bytes,
        "high_water_bytes": high_water or usage.high_water_bytes,
        "process_bytes": status_bytes("VmHWM"),
    }
    meter.stop()
    print(json.dumps(figures | extra))


if __name__ == "__main__":
    main()
