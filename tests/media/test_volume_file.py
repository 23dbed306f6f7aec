"""NIfTI files slice by slice: headers byte by byte, steps of the scaling, and bad files."""

import gzip

import nibabel
import numpy as np
import pytest

from lowtide import InputError, OutputError
from lowtide.media.volume_file import VolumeSink, VolumeSource, find_gradients
from lowtide.media.volume_header import inspect_volume
from support.nifti_files import nifti

SHAPE = (7, 5, 3, 4)
KINDS = {
    "int16": {},
    "uint8": {},
    "int8": {},
    "uint16": {"version": 2, "extension": b"a note of the scanner"},
    "int32": {"order": ">", "scaling": (0.25, -3.0)},
    "uint32": {},
    "float32": {"order": ">", "version": 2},
    "float64": {"scaling": (2.0, 1.0)},
}


def stored_values(dtype: str) -> np.ndarray:
    random = np.random.default_rng(0)
    if np.dtype(dtype).kind == "f":
        return random.normal(100, 30, SHAPE).astype(dtype)
    info = np.iinfo(dtype)
    values = random.integers(info.min, info.max, SHAPE, dtype, endpoint=True)
    values.flat[:2] = info.min, info.max
    return values


def content(path) -> bytes:
    data = path.read_bytes()
    return gzip.decompress(data) if path.name.endswith(".gz") else data


def copied(path, target, change=0.0):
    """Copy slice by slice with a change in data units; returns how many values were clipped."""
    facts = inspect_volume(path)
    sink, clipped = VolumeSink(target, facts), 0
    with VolumeSource(facts) as source:
        for place in range(facts.slices):
            stored = source.read(place, place + 1)
            made, beyond = facts.to_stored(stored, np.full(stored.shape, change))
            sink.write(place, made)
            clipped += beyond
    sink.commit()
    return clipped


@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
@pytest.mark.parametrize("dtype", KINDS)
def test_unchanged_voxels_give_the_same_file(tmp_path, dtype, suffix):
    path = nifti(tmp_path / f"in{suffix}", stored_values(dtype), **KINDS[dtype])
    assert copied(path, tmp_path / f"out{suffix}") == 0
    assert content(path) == content(tmp_path / f"out{suffix}")
    assert sorted(one.name for one in tmp_path.iterdir()) == [f"in{suffix}", f"out{suffix}"]


@pytest.mark.parametrize("dtype", KINDS)
def test_slices_are_those_of_nibabel(tmp_path, dtype):
    path = nifti(tmp_path / "in.nii.gz", stored_values(dtype), **KINDS[dtype])
    facts, expected = inspect_volume(path), nibabel.load(path).get_fdata()
    assert (facts.shape, facts.slices, facts.slice_shape) == (SHAPE, 12, (5, 7, 1))
    with VolumeSource(facts) as source:
        found = facts.to_units(np.concatenate([source.read(2, 4), source.read(6, 7)]))
    places = [(2, 0), (0, 1), (0, 2)]
    for image, (z, volume) in zip(found[..., 0], places, strict=True):
        np.testing.assert_allclose(image.T, expected[:, :, z, volume], rtol=1e-6)


@pytest.mark.parametrize("dtype", KINDS)
def test_changes_are_rounded_to_half_a_step_and_clipped(tmp_path, dtype):
    """Byte order and scaling stay: nothing drifts however often a file is written."""
    path = nifti(tmp_path / "in.nii", stored_values(dtype), **KINDS[dtype])
    before, out = nibabel.load(path), tmp_path / "out.nii"
    step = abs(inspect_volume(path).slope)
    clipped = copied(path, out, change=0.3 * step)
    after = nibabel.load(out)
    assert after.header.binaryblock == before.header.binaryblock
    apart = np.abs(after.get_fdata() - before.get_fdata() - 0.3 * step)
    integers = np.dtype(dtype).kind in "iu"
    assert apart.max() <= (0.5 * step if integers else 1e-4) and clipped == 0
    clipped = copied(path, tmp_path / "far.nii", change=3 * step)
    assert (clipped > 0) == integers
    assert nibabel.load(tmp_path / "far.nii").get_fdata().max() >= before.get_fdata().max()


def test_voxels_that_are_not_finite_keep_their_bits(tmp_path):
    values = stored_values("float32")
    values[1, 2, 0, 0], values[3, 3, 1, 1], values[0, 0, 0, 2] = np.nan, np.inf, -np.inf
    path = nifti(tmp_path / "in.nii", values)
    copied(path, tmp_path / "out.nii", change=5)
    after = nibabel.load(tmp_path / "out.nii").get_fdata()
    np.testing.assert_array_equal(np.isfinite(after), np.isfinite(values))
    np.testing.assert_allclose(after, values + 5, rtol=1e-6)


def damaged(tmp_path, name, change):
    path = nifti(tmp_path / name, stored_values("int16"))
    data = bytearray(content(path))
    data = change(data) or data
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


def packed(path):
    """Read all, as a plan does before anything is written."""
    facts = inspect_volume(path)
    with VolumeSource(facts) as source:
        source.read(0, facts.slices)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("in.nii", lambda data: data[:-10], "cut short: 1,182 bytes where 1,192"),
        ("in.nii.gz", lambda data: data[:-80], "ends after 10 of 12 slices"),
        ("in.nii", lambda data: bytes(data[:344]) + b"xyz" + data[347:], "no NIfTI file"),
        ("in.nii", lambda data: b"\x89PNG" + bytes(400), "no NIfTI file"),
        ("in.nii", lambda data: data[:100], "no NIfTI file"),
        ("in.nii", lambda data: bytes(data[:70]) + b"\x20\0" + data[72:], "complex64"),
        ("in.nii", lambda data: bytes(data[:70]) + b"\x80\0" + data[72:], "RGB"),
        ("in.nii", lambda data: bytes(data[:70]) + b"\x00\x04" + data[72:], "int64"),
        ("in.nii", lambda data: bytes(data[:70]) + b"\x33\x33" + data[72:], "damaged header"),
        ("in.nii", lambda data: bytes(data[:42]) + b"\xff\xff" + data[44:], "shape of -1"),
    ],
)
def test_bad_files_are_refused_by_name(tmp_path, name, change, message):
    path = damaged(tmp_path, name, change)
    with pytest.raises(InputError, match=message) as caught:
        packed(path)
    assert str(path) in caught.value.message


def test_bad_gzip_streams_and_names_are_refused(tmp_path):
    path = nifti(tmp_path / "in.nii.gz", stored_values("int16"))
    data = path.read_bytes()
    for broken in (data[:-9], data[:200], b"", data[:-8] + bytes(8), content(path)):
        path.write_bytes(broken)
        with pytest.raises(InputError, match=r"in\.nii\.gz: "):
            packed(path)
    for place in (tmp_path / "none.nii", tmp_path):
        with pytest.raises(InputError):
            inspect_volume(place)


def test_vectors_of_a_fifth_axis_are_refused(tmp_path):
    values = np.ones((4, 4, 2, 1, 3), np.float32)
    with pytest.raises(InputError, match="4 × 4 × 2 × 1 × 3"):
        inspect_volume(nifti(tmp_path / "in.nii", values))


def test_a_file_of_fewer_axes_is_one_volume(tmp_path):
    for shape, expected in (((6, 5), (6, 5, 1, 1)), ((6, 5, 3), (6, 5, 3, 1))):
        path = nifti(tmp_path / "in.nii", np.ones(shape, np.int16))
        assert inspect_volume(path).shape == expected


def test_forms_that_differ_are_noted(tmp_path):
    turned = np.diag([2.0, 2.5, 3.0, 1.0])
    path = nifti(tmp_path / "in.nii", stored_values("int16"), qform=(turned, 1))
    assert any("qform (code 1) and sform (code 2)" in one for one in inspect_volume(path).notes)
    path = nifti(tmp_path / "in.nii", stored_values("int16"), qform=(turned, 0))
    assert inspect_volume(path).notes == ()


def test_a_sink_that_stops_leaves_nothing(tmp_path):
    path = nifti(tmp_path / "in.nii", stored_values("int16"))
    facts = inspect_volume(path)
    sink = VolumeSink(tmp_path / "new" / "out.nii.gz", facts)
    sink.abort()
    with pytest.raises(OutputError):
        VolumeSink(tmp_path, facts)
    assert [one.name for one in tmp_path.iterdir()] == ["in.nii"]


def table(path, rows):
    path.write_text("\n".join(" ".join(map(str, row)) for row in rows) + "\n")


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 6])
def test_gradients_are_checked_and_copied_either_way(tmp_path, count, turned):
    vectors = np.eye(3)[np.arange(count) % 3].T
    table(tmp_path / "dwi.bval", [np.arange(count) * 1000])
    table(tmp_path / "dwi.bvec", vectors.T if turned else vectors)
    found = find_gradients(tmp_path / "dwi.nii.gz", count)
    found.copy(tmp_path / "clean.nii")
    for suffix in (".bval", ".bvec"):
        assert (tmp_path / f"dwi{suffix}").read_bytes() == (
            tmp_path / f"clean{suffix}"
        ).read_bytes()
    assert len(found.notes) == (count <= 3)


@pytest.mark.parametrize(
    ("values", "vectors", "message"),
    [
        ([[0, 1, 2]], None, "dwi.bval: 3 b-values, and .*dwi.nii.gz has 4 volumes"),
        (None, np.ones((3, 5)), "dwi.bvec: 3 × 5 numbers, and .*dwi.nii.gz has 4 volumes"),
        (None, np.ones((4, 4)), "4 × 4 numbers"),
        ([[0, "x", 2, 3]], None, "no table of numbers"),
        ([[0, 1], [2]], None, "numbers a row: 2 1"),
        ([["nan", 1, 2, 3]], None, "finite"),
        ([], None, "numbers a row: none"),
    ],
)
def test_gradients_that_do_not_fit_are_refused(tmp_path, values, vectors, message):
    for suffix, rows in ((".bval", values), (".bvec", vectors)):
        if rows is not None:
            table(tmp_path / f"dwi{suffix}", rows)
    with pytest.raises(InputError, match=message):
        find_gradients(tmp_path / "dwi.nii.gz", 4)


def test_a_missing_table_is_noted(tmp_path):
    assert find_gradients(tmp_path / "t1.nii", 1).paths == ()
    table(tmp_path / "dwi.bvals", [[0, 1, 2, 3]])
    assert "no directions" in find_gradients(tmp_path / "dwi.nii", 4).notes[0]
