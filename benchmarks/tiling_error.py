"""Where a window transformer in tiles and by bands differs from the whole run.

    LOWTIDE_DATA=... python benchmarks/tiling_error.py

Draws docs/images/tiling_error.png: a photograph, and next to it the largest difference at each of
its pixels, on a logarithmic scale. Tiles are the usual loop: padded on all sides, run one by one,
cropped.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from common import ResultFile
from padded_tiles import padded_tiles
from PIL import Image, ImageDraw, ImageFont
from streaming_models import made
from torch import Tensor

import lowtide

ROOT = Path(__file__).parents[1]
SOURCE, TARGET = ROOT / "examples" / "coffee.jpg", ROOT / "docs" / "images" / "tiling_error.png"
DETAIL = (232, 24, 552, 280)  # left, top, right, bottom
SCALE, TILE, PAD = 4, 96, 16
BUDGET = "160MiB"
# Errors from black to white, and the colors between: powers of ten.
LOWEST, HIGHEST = -8, -1
COLORS = ((0, 0, 0), (40, 40, 120), (190, 60, 60), (250, 200, 80), (255, 255, 255))
GAP, LABEL, BAR = 8, 26, 16
BACKGROUND, INK = (255, 255, 255), (40, 40, 40)


def colored(errors: Tensor) -> Image.Image:
    """(height, width) of errors as a picture."""
    powers = errors.clamp(min=10.0**LOWEST).log10()
    place = ((powers - LOWEST) / (HIGHEST - LOWEST)).clamp(0, 1) * (len(COLORS) - 1)
    stops = np.arange(len(COLORS))
    bands = [np.interp(place.numpy(), stops, levels) for levels in zip(*COLORS, strict=True)]
    return Image.fromarray(np.stack(bands, -1).astype(np.uint8))


def sheet(panels: list[tuple[str, Image.Image]]) -> Image.Image:
    """Panels side by side with their labels, and the scale below."""
    width, height = panels[0][1].size
    whole = Image.new(
        "RGB", (len(panels) * (width + GAP) - GAP, height + 2 * LABEL + BAR + GAP), BACKGROUND
    )
    pen, font = ImageDraw.Draw(whole), ImageFont.load_default(size=13)
    for index, (label, picture) in enumerate(panels):
        left = index * (width + GAP)
        whole.paste(picture, (left, 0))
        pen.text((left + width / 2, height + LABEL / 2), label, INK, font, anchor="mm")
    left, bar = width + GAP, 2 * width + GAP
    powers = torch.linspace(LOWEST, HIGHEST, bar).expand(BAR, bar)
    whole.paste(colored(10.0**powers), (left, height + LABEL))
    for power in range(LOWEST, HIGHEST + 1):
        at = left + (power - LOWEST) / (HIGHEST - LOWEST) * bar
        anchor = "lm" if power == LOWEST else "rm" if power == HIGHEST else "mm"
        text = f"1e{power}" if power > LOWEST else f"1e{power} or less"
        pen.text((at, height + LABEL + BAR + LABEL / 2), text, INK, font, anchor=anchor)
    pen.text(
        (left - GAP, height + LABEL + BAR / 2),
        "difference from the whole run (of 0 to 1)",
        INK,
        font,
        anchor="rm",
    )
    return whole


def main() -> None:
    """Measure, keep the figures, draw."""
    results = ResultFile(
        "tiling_error",
        fresh=True,
        about=f"A trained CRAFT x{SCALE} on a photograph: in tiles of {TILE} px with {PAD} px of"
        f" context, and streamed in {BUDGET}.",
    )
    model = made("CRAFT")
    with Image.open(SOURCE) as photograph:
        detail = photograph.convert("RGB").crop(DETAIL)
    image = torch.from_numpy(np.array(detail)).permute(2, 0, 1)[None] / 255
    streamed = lowtide.stream(model, budget=BUDGET)
    with torch.inference_mode():
        whole = model(image)
        tiled = padded_tiles(model, image, SCALE, TILE, PAD)
        ways = {"in tiles": tiled, "streamed": streamed(image)}
    panels = [("photograph", detail)]
    for name, result in ways.items():
        difference = (result - whole).abs()
        mean = difference.double().square().mean().sqrt().item()
        results.add(
            name,
            max_abs_error=difference.max().item(),
            psnr_db=round(-20 * math.log10(mean), 1),
            **({"plan": streamed.explain(image)} if name == "streamed" else {}),
        )
        # Each pixel of the panel shows the largest of those made of one of the photograph's.
        largest = F.max_pool2d(difference.amax(1, keepdim=True), SCALE)[0, 0]
        panels.append((f"{name}: {results.row(name)['psnr_db']} dB", colored(largest)))
    TARGET.parent.mkdir(exist_ok=True)
    sheet(panels).quantize(192).save(TARGET, optimize=True)


if __name__ == "__main__":
    main()
