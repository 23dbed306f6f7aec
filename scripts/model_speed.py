"""Write how long the bundled models take for a megapixel, which `lowtide models` shows.

    python scripts/model_speed.py

In processor seconds of one thread, for a picture of 512 × 512: the least of some rounds, in which
the models take turns. Other processes make it longer, so let none run.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch

from lowtide.core.cpuinfo import cpu_name
from lowtide.models import bundled_names, load
from lowtide.models.denoiser.denoiser import denoisers_in

TARGET = Path(__file__).parents[1] / "src/lowtide/models/weights/speed.json"
SIDE, ROUNDS = 512, 5


def main() -> None:
    """Measure all models, and write the file."""
    torch.set_num_threads(1)
    models = {name: load(name) for name in bundled_names()}
    image = torch.rand(1, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    taken: dict[str, list[float]] = {name: [] for name in models}
    for model in models.values():
        for denoiser in denoisers_in(model.module):
            denoiser.set_level(25 / 255)
        model.to(memory_format=torch.channels_last)
    image = image.contiguous(memory_format=torch.channels_last)
    for _ in range(ROUNDS):
        for name, model in models.items():
            started = time.process_time()
            model(image)
            taken[name].append(time.process_time() - started)
    pixels = SIDE * SIDE / 1e6
    seconds = {name: round(min(found) / pixels, 2) for name, found in taken.items()}
    facts = {
        "cpu": cpu_name(),
        "torch": str(torch.__version__),
        "threads": 1,
        "cpu_seconds_per_megapixel": seconds,
    }
    TARGET.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
