"""Draw the picture at the top of the README: one detail, enlarged four times in three ways.

    python scripts/draw_readme_picture.py [docs/images/coffee.png]

The detail is cut from examples/coffee.jpg. Left: its pixels as squares. Middle: bicubic. Right:
the bundled model lowtide-x4, run on the whole photograph and cut afterwards.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

import lowtide

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "examples" / "coffee.jpg"
TARGET = ROOT / "docs" / "images" / "coffee.png"
SCALE = 4
DETAIL = (365, 55, 455, 155)  # left, top, right, bottom in the photograph
GAP, LABEL = 6, 26
BACKGROUND, INK = (255, 255, 255), (40, 40, 40)
MOST_BYTES = 400_000


def enlarged_by_model(folder: Path) -> Image.Image:
    """The whole photograph, four times as large."""
    target = folder / "coffee_x4.png"
    lowtide.upscale(SOURCE, target, scale=SCALE, budget="512MiB", device="cpu")
    with Image.open(target) as image:
        return image.convert("RGB")


def panels() -> list[tuple[str, Image.Image]]:
    """Label and picture of each panel, from left to right."""
    with Image.open(SOURCE) as image:
        detail = image.convert("RGB").crop(DETAIL)
        whole = image.convert("RGB")
    size = detail.width * SCALE, detail.height * SCALE
    box = tuple(side * SCALE for side in DETAIL)
    cubic = whole.resize((whole.width * SCALE, whole.height * SCALE), Image.Resampling.BICUBIC)
    with tempfile.TemporaryDirectory() as folder:
        model = enlarged_by_model(Path(folder))
    return [
        ("input pixels", detail.resize(size, Image.Resampling.NEAREST)),
        ("bicubic x4", cubic.crop(box)),
        ("lowtide-x4", model.crop(box)),
    ]


def draw(parts: list[tuple[str, Image.Image]]) -> Image.Image:
    """The panels side by side, each with its label below."""
    width, height = parts[0][1].size
    sheet = Image.new("RGB", (len(parts) * (width + GAP) - GAP, height + LABEL), BACKGROUND)
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=16)
    for index, (label, picture) in enumerate(parts):
        left = index * (width + GAP)
        sheet.paste(picture, (left, 0))
        pen.text((left + width / 2, height + LABEL / 2), label, INK, font, anchor="mm")
    return sheet


def main() -> None:
    """Draw and save; stops if the file would be too large for a README."""
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET
    target.parent.mkdir(parents=True, exist_ok=True)
    draw(panels()).save(target, optimize=True)
    if target.stat().st_size > MOST_BYTES:
        raise SystemExit(f"{target}: {target.stat().st_size} bytes, over {MOST_BYTES}")
    print(f"{target}: {target.stat().st_size} bytes")


if __name__ == "__main__":
    main()
