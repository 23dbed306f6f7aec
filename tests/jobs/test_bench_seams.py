"""Seams of tiles, blended and not, compared with bands."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import lowtide
from lowtide import UsageError
from lowtide.jobs import bench_seams
from lowtide.jobs.bench_seams import BLENDS, OVERLAPS, compare_seams, merge_tiles
from lowtide.streaming.tiles.grid import split_axis


@pytest.mark.parametrize(
    ("size", "blend", "linear"),
    [((40, 56), 0, False), ((16, 40), 5, True), ((50, 17), 8, False), ((40, 56), 8, True)],
)
def test_tiles_of_one_image_merge_to_that_image(size, blend, linear):
    rows, columns = (split_axis(side, 24, 8, align=2, blend=blend) for side in size)
    picture = torch.rand(1, 3, 2 * size[0], 2 * size[1])
    tiles = {
        (row, column): picture[
            ..., 2 * top : 2 * (top + rows.tile), 2 * left : 2 * (left + columns.tile)
        ]
        for row, top in enumerate(rows.starts)
        for column, left in enumerate(columns.starts)
    }
    found = merge_tiles(tiles, rows, columns, 2, linear=linear)
    torch.testing.assert_close(found, picture, rtol=0, atol=1e-6)


def test_a_model_that_reaches_less_than_tiles_share_has_no_seams(tmp_path, save, photo):
    messages = []
    report = compare_seams(
        save(tmp_path / "photo.png", photo[:100, :170]),
        tile=64,
        device="cpu",
        budget="512MiB",
        progress=messages.append,
    )
    assert (report.width, report.height) == (160, 96)
    assert messages[:2] == ["the whole image", "bands of rows"]
    assert [(row.blend, row.overlap) for row in report.rows] == [
        ("streamed", 0),
        *((blend, overlap) for overlap in OVERLAPS for blend in BLENDS),
    ]
    rows = {(row.blend, row.overlap): row for row in report.rows}
    for key in (("streamed", 0), ("none", 16), ("none", 32)):  # its reach is 7
        assert rows[key].psnr_db is None or rows[key].psnr_db > 120
        assert rows[key].step_rms < 1e-3
    # Ramps of all that is shared take in pixels at the tiles' edges, which are wrong.
    assert rows["hann", 16].psnr_db < 100
    assert rows["hann", 16].seam_psnr_db < rows["hann", 16].psnr_db
    assert rows["none", 32].work > rows["none", 8].work > 1
    assert all(row.max_error >= row.step_rms for row in report.rows)


def test_steps_are_measured_at_cuts(monkeypatch, tmp_path, save):
    """Of a model that brightens what begins with a bright pixel, all is known beforehand."""

    class Loaded:
        descriptor = replace(lowtide.load("lowtide-x2").descriptor, scale=1)
        module = device = None

        def to(self, device):
            return self

        def __call__(self, x):
            return x + 0.1 * (x[..., :1, :1] > 0.5)

    monkeypatch.setattr(Loaded, "device", torch.device("cpu"))
    monkeypatch.setattr(bench_seams, "load", lambda name: Loaded())
    monkeypatch.setattr(bench_seams, "stream", lambda module, budget: Loaded())
    pixels = np.zeros((64, 128, 3), np.uint8)
    pixels[:, 64:] = 200  # where the third of three tiles begins
    picture = save(tmp_path / "halves.png", pixels)
    rows = {
        (row.blend, row.overlap): row for row in compare_seams(picture, tile=64, device="cpu").rows
    }
    assert rows["streamed", 0].psnr_db is None
    plain = rows["none", 16]
    # Two cuts, and a step of a tenth at one of them; from there on, 48 of 128 columns are off.
    assert plain.tiles == 3
    assert plain.step_rms == pytest.approx(25.5 / 2**0.5, abs=0.01)
    assert plain.max_error == pytest.approx(25.5, abs=0.01)
    assert plain.psnr_db == pytest.approx(-10 * np.log10(0.01 * 48 / 128), abs=0.01)
    # Of 16 columns round each cut, those behind the second.
    assert plain.seam_psnr_db == pytest.approx(-10 * np.log10(0.01 / 4), abs=0.01)
    # A ramp of 16 pixels takes a sixteenth of the step in its middle, and Hann's more.
    assert rows["linear", 16].step_rms == pytest.approx(25.5 / 16 / 2**0.5, abs=0.01)
    assert rows["linear", 16].step_rms < rows["hann", 16].step_rms < 0.2 * plain.step_rms


def test_unsuitable_tiles_and_images_are_refused(tmp_path, save, photo):
    picture = save(tmp_path / "photo.png", photo[:100, :170])
    for tile in (60, 32, 160):
        with pytest.raises(UsageError, match="tiles here"):
            compare_seams(picture, tile=tile, device="cpu")
    gray = save(tmp_path / "gray.png", photo[:100, :170, :1])
    with pytest.raises(UsageError, match="RGB"):
        compare_seams(gray, tile=64)
    with pytest.raises(UsageError, match="too small"):
        compare_seams(save(tmp_path / "tiny.png", photo[:10, :10]), tile=64)
