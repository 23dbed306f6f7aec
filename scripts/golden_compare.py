"""How far two results of a job are apart, by what their files hold."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

# Of a picture's samples, how many may differ, by one level of 255; and how far numbers may be
# apart, as a share of the largest.
SHARE, NUMBERS = 1e-5, 1e-5


def same(before: Path, now: Path) -> bool:
    """Whether two files have the same bytes; of a video, the same packets: each Matroska file has
    a number of its own."""
    if before.suffix in (".mkv", ".mp4"):
        return _packets(before) == _packets(now)
    return before.read_bytes() == now.read_bytes()


def difference(before: Path, now: Path) -> tuple[str, bool]:
    """Say how two files differ, and whether that is within the bounds of another plan."""
    readers = {
        ".csv": _table,
        ".npy": np.load,
        ".safetensors": _tensors,
        ".onnx": _onnx_result,
        ".gz": _volume,
        ".mkv": _frames,
        ".mp4": _frames,
    }
    one, other = (readers.get(before.suffix, _picture)(path) for path in (before, now))
    if one.shape != other.shape or one.dtype != other.dtype:
        return f"{other.shape} {other.dtype}, not {one.shape} {one.dtype}", False
    if one.dtype.kind in "US":
        return "other words", bool((one == other).all())
    apart = np.abs(one.astype(np.float64) - other.astype(np.float64))
    if one.dtype.kind in "ui":
        level = np.iinfo(one.dtype).max / 255
        share = float((apart > 0).mean())
        text = f"{share:.2g} of the samples by up to {apart.max() / level:.3g} levels"
        return text, bool(share <= SHARE and apart.max() <= level)
    relative = float(np.nanmax(apart) / max(np.nanmax(np.abs(one)), 1e-30))
    same_gaps = bool((np.isnan(one) == np.isnan(other)).all())
    return f"{relative:.2g} of the largest", same_gaps and relative <= NUMBERS


def _picture(path: Path) -> np.ndarray:
    import pyvips

    return pyvips.Image.new_from_file(str(path)).numpy()


def _table(path: Path) -> np.ndarray:
    """The numbers of a table; its words where they cannot be numbers."""
    with path.open(newline="", encoding="utf-8") as file:
        cells = [cell for row in csv.reader(file) for cell in row]
    numbers = []
    for cell in cells:
        try:
            numbers.append(float(cell))
        except ValueError:
            # A word counts as a number that only equals its own.
            numbers.append(float(int.from_bytes(cell.encode()[:6], "big")))
    return np.array(numbers)


def _tensors(path: Path) -> np.ndarray:
    from safetensors.numpy import load_file

    tensors = load_file(path)
    return np.concatenate([tensors[name].ravel() for name in sorted(tensors)])


def _onnx_result(path: Path) -> np.ndarray:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    given = np.random.default_rng(0).random((1, 3, 32, 40), np.float32)
    return np.asarray(session.run(None, {session.get_inputs()[0].name: given})[0])


def _volume(path: Path) -> np.ndarray:
    import nibabel

    return np.asarray(nibabel.load(path).dataobj)


def _packets(path: Path) -> list[tuple[int, int | None, bytes]]:
    """Stream, time and bytes of all packets."""
    import av

    with av.open(str(path)) as container:
        return [(one.stream_index, one.pts, bytes(one)) for one in container.demux()]


def _frames(path: Path) -> np.ndarray:
    """All pictures of a video."""
    import av

    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray() for frame in container.decode(video=0)])
