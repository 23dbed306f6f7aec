"""Header of a NIfTI file: shape, sample type and scaling of its voxels, and what is odd in it.

Voxels are stored with x fastest, then y, slices and volumes: a slice is an image (Y, X), and the
slices of all volumes follow each other.
"""

from __future__ import annotations

import gzip
import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import numpy as np

from lowtide.core.errors import InputError, UsageError, install_extra
from lowtide.core.input_file import require_input
from lowtide.media.image_info import ImageInfo

if TYPE_CHECKING:
    from nibabel.nifti1 import Nifti1Header

VOLUME_SUFFIXES = (".nii.gz", ".nii")
READ_ERRORS = (OSError, EOFError, zlib.error)
_TYPES = "int8, uint8, int16, uint16, int32, uint32, float32 and float64"
# Squares of larger values are no numbers of 32 bits; what a scanner measures is far below.
_MOST_UNITS = 1e18
_MOST_SHIFT = 0.5  # voxels between the corners that qform and sform give
_THICKER = 1.01  # headers are rounded


@dataclass(frozen=True)
class VolumeFacts:
    """What the header of a NIfTI file says of its voxels.

    ``shape`` is (X, Y, Z, V): columns, rows, slices and volumes. A stored value s is
    s·``slope`` + ``inter`` in data units. ``dtype`` has the file's byte order, and voxels begin
    after ``head_bytes`` bytes. ``notes`` are oddities that are kept as they are. ``sizes`` are the
    voxels' along X, Y and Z.
    """

    path: Path
    shape: tuple[int, int, int, int]
    dtype: np.dtype[Any]
    slope: float
    inter: float
    head_bytes: int
    notes: tuple[str, ...]
    sizes: tuple[float, float, float] = (1.0, 1.0, 1.0)

    @property
    def thick_axis(self) -> int:
        """Axis along which voxels are largest, 0 to 2: slices are as fine as can be across it.

        2, that of the slices in the file, unless another is thicker by more than a hundredth, and
        has no more voxels, as thick ones have.
        """
        axis = int(np.argmax(self.sizes))
        thicker = self.sizes[axis] > _THICKER * self.sizes[2]
        return axis if thicker and self.shape[axis] <= self.shape[2] else 2

    @property
    def plane_info(self) -> ImageInfo:
        """A slice across the thick axis as an image of float32."""
        width, height = (
            size for axis, size in enumerate(self.shape[:3]) if axis != self.thick_axis
        )
        return ImageInfo(width, height, 1, "float32")

    @property
    def slices(self) -> int:
        """Slices of all volumes."""
        return self.shape[2] * self.shape[3]

    @property
    def slice_info(self) -> ImageInfo:
        """One slice as an image of float32."""
        return ImageInfo(self.shape[0], self.shape[1], 1, "float32")

    @property
    def slice_shape(self) -> tuple[int, int, int]:
        """(H, W, 1) of one slice."""
        return self.slice_info.shape

    @property
    def slice_bytes(self) -> int:
        """Bytes of one slice in the file, before compression."""
        return self.shape[0] * self.shape[1] * self.dtype.itemsize

    @cached_property
    def limits(self) -> tuple[float, float]:
        """Least and largest value that can be stored."""
        info = np.iinfo(self.dtype) if self.dtype.kind in "iu" else np.finfo(self.dtype)
        return float(info.min), float(info.max)

    def to_units(self, stored: np.ndarray) -> np.ndarray:
        """Return stored values in data units, float32: infinity beyond `_MOST_UNITS`."""
        with np.errstate(over="ignore", invalid="ignore"):
            units = stored.astype(np.float64) * self.slope + self.inter
            units[np.abs(units) > _MOST_UNITS] *= np.inf
            return units.astype(np.float32)

    def to_stored(self, stored: np.ndarray, change: np.ndarray) -> tuple[np.ndarray, int]:
        """Add a finite change in data units to stored values.

        Where it is 0, and where the stored value is not finite, the value is the same, bit by bit;
        integers go to the nearest step. Values that the type cannot hold are clipped, and counted.
        """
        moved = stored.astype(np.float64) + change / self.slope
        if self.dtype.kind in "iu":
            moved = np.rint(moved)
        low, high = self.limits
        changed = (change != 0) & np.isfinite(stored)
        clipped = changed & ((moved < low) | (moved > high))
        made = stored.copy()
        made[changed] = moved[changed].clip(low, high)
        return made, int(clipped.sum())


def inspect_volume(path: Path | str) -> VolumeFacts:
    """Read the header of a NIfTI-1 or NIfTI-2 file, compressed by gzip or not.

    Raises:
        UsageError: nibabel is not installed.
        InputError: The file is missing, empty, damaged, cut short or no NIfTI file, or its voxels
            are not real numbers of up to 64 bits in up to four axes.
    """
    path = Path(path)
    header = _read_header(path)
    dtype = header.get_data_dtype()
    if dtype.kind not in "iuf" or (dtype.kind in "iu" and dtype.itemsize > 4) or dtype.itemsize > 8:
        from nibabel.nifti1 import data_type_codes

        label = data_type_codes.label[int(cast(Any, header["datatype"]))]
        raise InputError(
            f"{path}: voxels are {label}, and only {_TYPES} can be denoised",
            hint="save magnitudes of one of these types",
        )
    slope, inter = (float(cast(Any, header[name])) for name in ("scl_slope", "scl_inter"))
    if not np.isfinite(slope) or slope == 0:
        slope, inter = 1.0, 0.0
    if not np.isfinite(inter):
        raise InputError(f"{path}: damaged header: scl_inter is {inter:g}")
    facts = VolumeFacts(
        path=path,
        shape=_shape(path, header),
        dtype=dtype,
        slope=slope,
        inter=inter,
        head_bytes=int(header.get_data_offset()),
        notes=tuple(_form_notes(header)),
        sizes=_voxel_sizes(header),
    )
    if not path.name.lower().endswith(".gz"):
        size, expected = path.stat().st_size, facts.head_bytes + facts.slices * facts.slice_bytes
        if size < expected:
            raise InputError(f"{path}: cut short: {size:,} bytes where {expected:,} are expected")
    return facts


def open_bytes(path: Path) -> BinaryIO:
    """Open a file for reading, decompressed where its name ends in .gz."""
    if path.name.lower().endswith(".gz"):
        return cast(BinaryIO, gzip.open(path, "rb"))
    return path.open("rb")


def _read_header(path: Path) -> Nifti1Header:
    try:
        from nibabel.nifti1 import Nifti1Header
        from nibabel.nifti2 import Nifti2Header
        from nibabel.spatialimages import HeaderDataError
        from nibabel.wrapstruct import WrapStructError
    except ImportError as error:
        raise UsageError("NIfTI files need nibabel", hint=install_extra("mri")) from error
    require_input(path)
    try:
        with open_bytes(path) as file:
            head = file.read(540)
            if not head:
                raise InputError(f"{path}: the file is empty (0 bytes)")
            kind = Nifti1Header if head[344:347] == b"n+1" else Nifti2Header
            if kind is Nifti2Header and head[4:7] != b"n+2":
                raise InputError(
                    f"{path}: no NIfTI file: neither n+1 nor n+2 stands at its place",
                    hint="convert it, for example with dcm2niix or mri_convert",
                )
            file.seek(0)
            return kind.from_fileobj(file)
    except READ_ERRORS as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    except (HeaderDataError, WrapStructError) as error:
        raise InputError(f"{path}: damaged header: {error}") from error


def _shape(path: Path, header: Nifti1Header) -> tuple[int, int, int, int]:
    sizes = [int(size) for size in header.get_data_shape()]
    shown = " × ".join(map(str, sizes))
    if not sizes or min(sizes) < 1:
        raise InputError(f"{path}: damaged header: a shape of {shown or 'no axes'}")
    if any(size > 1 for size in sizes[4:]):
        raise InputError(
            f"{path}: a shape of {shown}, and axes beyond the fourth hold vectors or matrices,"
            " which are not denoised",
            hint="denoise the 4-D series that they were made from",
        )
    x, y, z, volumes = (*sizes, 1, 1, 1)[:4]
    return x, y, z, volumes


def _voxel_sizes(header: Nifti1Header) -> tuple[float, float, float]:
    """Return the voxel sizes along three axes; all 1 where the header has none."""
    x, y, z = (abs(float(size)) for size in (*header.get_zooms(), 1.0, 1.0, 1.0)[:3])
    known = all(np.isfinite(size) and size > 0 for size in (x, y, z))
    return (x, y, z) if known else (1.0, 1.0, 1.0)


def _form_notes(header: Nifti1Header) -> list[str]:
    """Return a note where qform and sform place voxels differently."""
    from nibabel.spatialimages import HeaderDataError

    codes = int(cast(Any, header["qform_code"])), int(cast(Any, header["sform_code"]))
    try:
        qform, sform = (np.asarray(one) for one in (header.get_qform(), header.get_sform()))
    except (HeaderDataError, ValueError) as error:
        return [f"the qform is not valid, and kept as it is: {error}"]
    if not all(codes):
        return []
    ends = np.array([*header.get_data_shape(), 1, 1, 1][:3]) - 1
    corners = np.array([[*(ends * place), 1] for place in np.ndindex(2, 2, 2)])
    shift = np.linalg.norm((corners @ (qform - sform).T)[:, :3], axis=1).max()
    if shift <= _MOST_SHIFT * np.min(np.abs(header.get_zooms()[:3])):
        return []
    return [
        f"qform (code {codes[0]}) and sform (code {codes[1]}) place voxels up to {shift:.1f} mm"
        " from each other; both are kept as they are"
    ]
