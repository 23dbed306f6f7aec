"""NIfTI files of known content for tests."""

import gzip
from pathlib import Path
from typing import Any

import numpy as np


def nifti(
    path: Path, stored: np.ndarray, *, scaling: tuple[float, float] | None = None, **more: Any
):
    """Write stored values (X, Y, Z, V) as they are, with a header that has something of all.

    ``more``: ``version`` (1, 2), ``order`` (< or >), ``extension``, ``qform`` and ``sform`` as
    (matrix, code).
    """
    import nibabel

    kind = {1: nibabel.Nifti1Image, 2: nibabel.Nifti2Image}[more.get("version", 1)]
    affine = np.array([[-2, 0.1, 0, 90], [0, 2.5, 0.2, -120], [0, 0, 3, -70], [0, 0, 0, 1]])
    order = more.get("order", "<")
    image = kind(stored.astype(stored.dtype.newbyteorder(order)), affine)
    header = image.header.as_byteswapped(order)
    image = kind(stored.astype(stored.dtype.newbyteorder(order)), affine, header)
    header = image.header
    header.set_qform(*more.get("qform", (affine, 1)))
    header.set_sform(*more.get("sform", (affine, 2)))
    header.set_xyzt_units("mm", "sec")
    zooms = (*header.get_zooms()[:3], 2.5, 1.0)
    header.set_zooms(zooms[: stored.ndim])
    header["descrip"] = b"made for a test"
    if "extension" in more:
        header.extensions.append(nibabel.nifti1.Nifti1Extension("comment", more["extension"]))
    if scaling is not None:
        header.set_slope_inter(*scaling)
    nibabel.save(image, path)
    if scaling is not None:
        _set_scaling(path, header, stored, scaling)
    return path


def _set_scaling(path: Path, header: Any, stored: np.ndarray, scaling: tuple[float, float]) -> None:
    """Write the stored values and the scaling, which nibabel would choose anew."""
    packed = path.name.endswith(".gz")
    data = bytearray(gzip.decompress(path.read_bytes()) if packed else path.read_bytes())
    saved = type(header)(
        bytes(data[: header.sizeof_hdr]), endianness=header.endianness, check=False
    )
    saved["scl_slope"], saved["scl_inter"] = scaling
    offset = int(saved["vox_offset"])
    data[: header.sizeof_hdr] = saved.binaryblock
    data[offset:] = stored.astype(header.get_data_dtype()).tobytes(order="F")
    path.write_bytes(gzip.compress(data) if packed else data)


def brain(shape: tuple[int, ...], level: float = 1000.0) -> np.ndarray:
    """Smooth tissue in a head with background 0, float32 (X, Y, Z, V); volumes differ smoothly."""
    x, y, z, v = np.meshgrid(*(np.arange(size) for size in (*shape, 1, 1)[:4]), indexing="ij")
    radius = np.hypot((x - shape[0] / 2) / shape[0], (y - shape[1] / 2) / shape[1])
    tissue = 0.7 + 0.3 * np.sin(x / 6 + z / 3) * np.cos(y / 8)
    decay = np.exp(-0.05 * v * (1.5 + np.sin(y / 9)))
    return (level * tissue * decay * (radius < 0.42)).astype(np.float32)[
        ..., : shape[3] if len(shape) > 3 else 1
    ]
