"""What `lowtide.estimate_vram_usage` says of LDM4TS, beside what was claimed of such trainings.

    python benchmarks/ldm4ts_estimates.py [--fresh]

Steps are traced for a GPU that need not be there, with attention at all levels. Predicted only.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

from common import ResultFile, row_parser

from lowtide import UsageError, estimate_vram_usage
from lowtide.memory.training.meta_build import build_on_meta
from lowtide.models.ldm4ts import LDM4TSModel

SIZE = (224, 224)
ESTIMATED = ("math", "default", "flash", "sage")
# Widths: the default's, and that of a network with as many weights as the guide of the seeds has.
WIDTHS = 32, 640
# What that guide claims for 4 images, in GB, by backend and checkpointing.
CLAIMED = {
    ("math", False): 8.0,
    ("math", True): 5.5,
    ("flash", False): 5.2,
    ("flash", True): 3.7,
    ("sage", False): 5.7,
    ("sage", True): 4.1,
}


def main() -> None:
    """Estimate what is missing."""
    options = row_parser(__doc__).parse_args()
    results = ResultFile(
        "ldm4ts_estimates",
        fresh=options.fresh,
        about="Memory of LDM4TS trainings, predicted, beside what was claimed of such trainings.",
    )
    for width, backend, checkpointing in itertools.product(WIDTHS, ESTIMATED, (False, True)):
        how = ", checkpointing" if checkpointing else ""
        row = f"width {width}, {backend}{how}"
        if options.only not in row or results.has(row):
            continue
        model = partial(LDM4TSModel, SIZE, [15, 60, 240], width=width, attention_tokens=784)
        figures: dict[str, Any] = {"width": width, "backend": backend, "batch": 4}
        figures["parameters"] = sum(one.numel() for one in build_on_meta(model).parameters())
        figures["claimed_gb"] = CLAIMED.get((backend, checkpointing))
        try:
            found = estimate_vram_usage(4, backend, checkpointing, model=model)
        except UsageError as error:
            figures["refused"] = error.message
        else:
            figures |= {name: found[name] for name in found if name.endswith(("_gb", "_pct"))}
            figures["notes"] = found["notes"]
        results.add(row, checkpointing=checkpointing, **figures)


if __name__ == "__main__":
    main()
