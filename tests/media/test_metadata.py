from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image, ImageCms

from lowtide.media import FORMATS, ImageMetadata, inspect_image, open_image
from lowtide.media.formats import ImageFormat
from support.media_files import make_exif, make_rows, read_image, write_image

ICC = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
XMP = (
    b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF '
    b'xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#"><rdf:Description '
    b'xmlns:tiff="http://ns.adobe.com/tiff/1.0/" tiff:Orientation="%d"/></rdf:RDF></x:xmpmeta>'
)
# One Photoshop resource with one caption.
_CAPTION = b"\x1c\x02\x78\x00\x06sunset"
IPTC = b"Photoshop 3.0\0" + b"8BIM\x04\x04\0\0\0\0\0" + bytes([len(_CAPTION)]) + _CAPTION + b"\0"

WRITTEN = [one for one in FORMATS if one.save]


def everything(path: Path, orientation: int = 1) -> ImageMetadata:
    """Metadata as it comes out of a JPEG that has all of it."""
    Image.fromarray(make_rows(20, 30, 3)).save(
        path, exif=make_exif(orientation), icc_profile=ICC, dpi=(300, 300), xmp=XMP % orientation
    )
    with open_image(path) as source:
        return replace(source.metadata, iptc=IPTC)


def reread(path: Path) -> ImageMetadata:
    with open_image(path) as source:
        return source.metadata


@pytest.mark.parametrize("entry", WRITTEN, ids=lambda entry: entry.name)
def test_a_format_keeps_exactly_what_its_facts_say(tmp_path: Path, entry: ImageFormat) -> None:
    metadata = everything(tmp_path / "source.jpg", 6)
    rows = read_image(tmp_path / "source.jpg")
    back = reread(write_image(tmp_path / f"a{entry.suffixes[0]}", rows, metadata=metadata))
    kept = {name for name in ("icc", "exif", "xmp", "iptc") if getattr(back, name) is not None}
    if back.xres == pytest.approx(300 / 25.4, rel=1e-3):
        kept.add("resolution")
    assert kept == set(entry.metadata_kinds)
    assert back.icc == ICC


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".webp", ".avif"])
def test_exif_survives_except_for_its_orientation(tmp_path: Path, suffix: str) -> None:
    metadata = everything(tmp_path / "source.jpg", 6)
    path = write_image(tmp_path / f"a{suffix}", make_rows(48, 32, 3), metadata=metadata)
    with Image.open(path) as image:
        exif = image.getexif()
    photo, gps = exif.get_ifd(0x8769), exif.get_ifd(0x8825)
    assert exif.get(0x0112, 1) == 1
    assert exif[0x010F] == "Maker"
    assert (photo[0x9003], photo[0x927C]) == ("2020:01:02 03:04:05", bytes(range(64)))
    assert (gps[1], gps[2]) == ("N", (10.0, 20.0, 30.5))
    assert (photo[0xA002], photo[0xA003]) == (32, 48)


def test_an_orientation_in_xmp_is_reset_too(tmp_path: Path) -> None:
    assert everything(tmp_path / "source.jpg", 6).xmp == XMP % 1


def test_the_thumbnail_is_dropped(tmp_path: Path) -> None:
    Image.new("RGB", (16, 16), (1, 2, 3)).save(tmp_path / "thumb.jpg")
    thumbnail = (tmp_path / "thumb.jpg").read_bytes()
    exif = _exif_with_thumbnail(thumbnail)
    Image.fromarray(make_rows(20, 30, 3)).save(tmp_path / "source.jpg", exif=exif)
    with open_image(tmp_path / "source.jpg") as source:
        metadata, rows = source.metadata, source.read(0, 20)
    assert metadata.exif is not None
    assert thumbnail in metadata.exif
    for suffix in (".jpg", ".png", ".webp", ".avif"):
        path = write_image(tmp_path / f"a{suffix}", rows, metadata=metadata)
        assert thumbnail not in path.read_bytes()
        with Image.open(path) as image:
            assert not image.getexif().get_ifd(0x0201)
            assert image.getexif()[0x010F] == "Me"


def _exif_with_thumbnail(thumbnail: bytes) -> bytes:
    def entry(tag: int, kind: int, count: int, value: int | bytes) -> bytes:
        raw = value if isinstance(value, bytes) else value.to_bytes(4, "little")
        head = tag.to_bytes(2, "little") + kind.to_bytes(2, "little")
        return head + count.to_bytes(4, "little") + raw.ljust(4, b"\0")

    first = b"\1\0" + entry(0x010F, 2, 3, b"Me\0") + (26).to_bytes(4, "little")
    at = 26 + 2 + 3 * 12 + 4
    second = b"\3\0" + entry(0x0103, 3, 1, 6) + entry(0x0201, 4, 1, at)
    second += entry(0x0202, 4, 1, len(thumbnail)) + bytes(4)
    return b"Exif\0\0" + b"II*\0\x08\0\0\0" + first + second + thumbnail


@pytest.mark.parametrize("entry", WRITTEN, ids=lambda entry: entry.name)
def test_stripping_leaves_the_profile_only(tmp_path: Path, entry: ImageFormat) -> None:
    metadata = everything(tmp_path / "source.jpg")
    path = tmp_path / f"a{entry.suffixes[0]}"
    write_image(path, make_rows(20, 30, 3), metadata=metadata, strip_metadata=True)
    back = reread(path)
    assert back.icc == ICC
    assert (back.exif, back.xmp, back.iptc) == (None, None, None)


@pytest.mark.parametrize("entry", WRITTEN, ids=lambda entry: entry.name)
def test_nothing_is_made_up(tmp_path: Path, entry: ImageFormat) -> None:
    back = reread(write_image(tmp_path / f"a{entry.suffixes[0]}", make_rows(20, 30, 3)))
    assert (back.icc, back.exif, back.xmp, back.iptc) == (None, None, None, None)


def test_a_16_bit_png_keeps_its_profile(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    write_image(path, make_rows(20, 30, 3, "uint16"), metadata=ImageMetadata(icc=ICC))
    assert inspect_image(path).info.sample_type == "uint16"
    assert reread(path).icc == ICC


def test_a_profile_for_other_bands_is_left_out_with_a_note(tmp_path: Path) -> None:
    from lowtide.media import open_sink
    from support.media_files import info_of

    rows = make_rows(20, 30, 1)
    sink = open_sink(tmp_path / "a.png", info_of(rows), metadata=ImageMetadata(icc=ICC))
    sink.write(0, rows)
    assert any("ICC" in note for note in sink.notes)
    assert reread(sink.commit()).icc is None
