"""Color that a file describes without a profile, and what is beside a picture in its file."""

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
import tifffile
from PIL import Image, ImageCms

import lowtide
from lowtide import OutputError
from lowtide.media import inspect_image
from lowtide.media.metadata import strip_part_marks
from lowtide.media.stated_color import (
    SRGB_PLACES,
    ColorDescription,
    heif_color,
    png_chunks,
    rgb_profile_of_gray,
)
from support.media_files import make_exif

SRGB = ImageCms.createProfile("sRGB")
P3: Any = ColorDescription.of_codes(12, 13)
BUDGET = "256MiB"


pytestmark = pytest.mark.usefixtures("quick")


def with_chunks(path, **chunks):
    """Put chunks after the header of a PNG."""
    data, made = path.read_bytes(), b""
    for name, content in chunks.items():
        body = name.encode() + content
        made += struct.pack(">L", len(content)) + body + struct.pack(">L", zlib.crc32(body))
    path.write_bytes(data[:33] + made + data[33:])
    return path


def in_srgb(rows, profile):
    """Colors of (H, W, C), uint8, as a managed viewer shows them."""
    if profile is None:
        return np.broadcast_to(rows, (*rows.shape[:2], 3)).astype(float)
    image = Image.fromarray(rows.squeeze())
    made = ImageCms.profileToProfile(
        image, ImageCms.ImageCmsProfile(io.BytesIO(profile)), SRGB, outputMode="RGB"
    )
    assert made is not None
    return np.asarray(made).astype(float)


def shown(path):
    with Image.open(path) as image:
        return in_srgb(np.asarray(image), image.info.get("icc_profile"))


def info_of(path):
    with Image.open(path) as image:
        return {**image.info, "maker": image.getexif().get(0x010F)}


def halved(rows):
    high, wide = rows.shape[0] // 2, rows.shape[1] // 2
    return rows.reshape(high, 2, wide, 2, 3).mean((1, 3))


def upscaled(source, target, **options):
    report = lowtide.upscale(source, target, budget=BUDGET, force=True, **options)
    return report.images[0]


@pytest.mark.parametrize("gamma", [1.0, 1.8, 2.4])
@pytest.mark.parametrize("colors", [1, 3])
def test_profiles_show_what_they_describe(gamma, colors):
    values = np.arange(256, dtype=np.uint8).reshape(16, 16, 1).repeat(colors, 2)
    made = ColorDescription(SRGB_PLACES, (gamma,)).profile(colors, "test")
    light = (values[..., :1] / 255) ** gamma
    want = np.where(light <= 0.0031308, 12.92 * light, 1.055 * light ** (1 / 2.4) - 0.055) * 255
    off = np.abs(in_srgb(values, made) - want)
    assert off.mean() < 0.6 and off[1:].max() < 2  # the color engine errs in the dark
    if colors == 1:
        again = in_srgb(values.repeat(3, 2), rgb_profile_of_gray(made))
        assert np.abs(again - want)[1:].max() < 2


@pytest.mark.parametrize("name", ["out.png", "out.jpg", "out.webp", "out.avif", "out.tif"])
@pytest.mark.parametrize(
    ("chunks", "description"),
    [
        ({"cICP": bytes([12, 13, 0, 1])}, P3),
        ({"gAMA": struct.pack(">L", 55_556)}, ColorDescription(SRGB_PLACES, (1.8,))),
        (
            {
                "gAMA": struct.pack(">L", 45_455),
                "cHRM": struct.pack(
                    ">8L", 31_270, 32_900, 64_000, 33_000, 21_000, 71_000, 15_000, 6_000
                ),
            },
            ColorDescription(((0.64, 0.33), (0.21, 0.71), (0.15, 0.06), (0.3127, 0.329)), (2.2,)),
        ),
    ],
    ids=["cICP", "gAMA", "cHRM"],
)
def test_the_color_of_a_png_is_kept_in_every_format(
    chunks, description, name, piece, tmp_path, save
):
    source = with_chunks(save(tmp_path / "in.png", piece), **chunks)
    report = upscaled(source, tmp_path / name, jpeg_quality=98, avif_quality=95)
    want = in_srgb(piece, description.profile(3, "true"))
    assert np.abs(want - piece).mean() > 2  # than if it were lost
    got = halved(shown(tmp_path / name))
    assert np.abs(got - want).mean() < 3 and abs((got - want).mean()) < 0.5
    assert any("kept as an ICC profile" in one for one in report.notes)


def test_a_description_of_srgb_changes_nothing(piece, tmp_path, save):
    for place, chunks in enumerate(
        (
            {"cICP": bytes([1, 13, 0, 1])},
            {"gAMA": struct.pack(">L", 45_455)},
            {"sRGB": b"\0", "gAMA": struct.pack(">L", 70_000)},
        )
    ):
        source = with_chunks(save(tmp_path / f"{place}.png", piece), **chunks)
        assert inspect_image(source).color is None


@pytest.mark.parametrize(("transfer", "name"), [(16, "PQ"), (18, "HLG")])
def test_pictures_of_hdr_stay_what_they_are_or_are_refused(
    transfer, name, piece, tmp_path, save, read
):
    codes = bytes([9, transfer, 0, 1])
    source = with_chunks(save(tmp_path / "in.png", piece.astype(np.uint16) * 257), cICP=codes)
    plain = save(tmp_path / "plain.png", piece.astype(np.uint16) * 257)
    report = upscaled(source, tmp_path / "out.png")
    upscaled(plain, tmp_path / "plain_out.png")
    assert png_chunks(tmp_path / "out.png")[b"cICP"] == codes
    assert np.array_equal(read(tmp_path / "out.png"), read(tmp_path / "plain_out.png"))
    assert any(f"BT.2020 with {name}" in one for one in report.notes)
    with pytest.raises(OutputError, match=f"BT.2020 with {name}") as caught:
        upscaled(source, tmp_path / "out.jpg")
    assert "out.png" in (caught.value.hint or "")


def test_the_color_of_an_avif_is_kept(piece, tmp_path):
    """Its nclx box; the file is one of sRGB, whose numbers are changed."""
    path = tmp_path / "in.avif"
    Image.fromarray(piece).save(path, quality=95)
    data = path.read_bytes()
    place = data.index(b"colrnclx") + 8
    path.write_bytes(data[:place] + struct.pack(">HH", 12, 13) + data[place + 4 :])
    assert getattr(heif_color(path), "codes", None) == (12, 13)
    upscaled(path, tmp_path / "out.png")
    want = in_srgb(piece, P3.profile(3, "true"))
    assert abs((halved(shown(tmp_path / "out.png")) - want).mean()) < 0.5
    assert np.abs(halved(shown(tmp_path / "out.png")) - want).mean() < 4


@pytest.mark.parametrize("name", ["out.png", "out.webp", "out.avif"])
def test_a_gray_profile_is_kept_where_gray_is_stored_as_rgb(name, piece, tmp_path):
    gray = piece.mean(2).round().astype(np.uint8)
    profile = ColorDescription(SRGB_PLACES, (1.8,)).profile(1, "gray")
    Image.fromarray(gray).save(tmp_path / "in.png", icc_profile=profile)
    report = upscaled(tmp_path / "in.png", tmp_path / name)
    assert abs((halved(shown(tmp_path / name)) - in_srgb(gray, profile)).mean()) < 0.5
    assert not any("profile" in one for one in report.notes)


@pytest.mark.parametrize("sample", [np.uint8, np.uint16])
def test_opaque_alpha_is_left_out_of_a_jpeg(sample, piece, tmp_path, save, read):
    most = np.iinfo(sample).max
    full = np.dstack([piece.astype(sample) * (most // 255), np.full(piece.shape[:2], most)])
    source = save(tmp_path / "in.png", full.astype(sample))
    report = upscaled(source, tmp_path / "out.jpg")
    plain = save(tmp_path / "plain.png", full[..., :3].astype(sample))
    upscaled(plain, tmp_path / "plain.jpg")
    assert np.array_equal(read(tmp_path / "out.jpg"), read(tmp_path / "plain.jpg"))
    assert "alpha is full everywhere, and left out" in report.notes
    assert report.plan is not None and report.plan.image.network_inputs == 1
    full[7, 9, 3] = most // 2
    with pytest.raises(OutputError, match="cannot store transparency"):
        upscaled(save(tmp_path / "in.png", full.astype(sample)), tmp_path / "out.jpg")


def test_no_resolution_and_no_exif_is_invented(piece, tmp_path):
    for source in ("in.png", "in.jpg", "in.webp", "in.tif"):
        if source == "in.tif":
            tifffile.imwrite(tmp_path / source, piece, photometric="rgb", metadata=None)
        else:
            Image.fromarray(piece).save(tmp_path / source)
        for name in ("out.png", "out.jpg", "out.webp", "out.tif", "out.avif"):
            lowtide.denoise(tmp_path / source, tmp_path / name, sigma=0, force=True, budget=BUDGET)
            if name == "out.tif":
                with tifffile.TiffFile(tmp_path / name) as file:
                    assert not {282, 283, 296} & {one.code for one in file.pages.first.tags}
                continue
            info = info_of(tmp_path / name)
            assert not {"dpi", "exif", "jfif_density"} & set(info), (source, name)


def test_a_resolution_that_is_there_is_kept_without_exif(piece, tmp_path):
    for source in ("in.png", "in.jpg", "in.tif"):
        Image.fromarray(piece).save(tmp_path / source, dpi=(300, 150))
        for name in ("out.png", "out.jpg", "out.tif"):
            lowtide.denoise(tmp_path / source, tmp_path / name, sigma=0, force=True, budget=BUDGET)
            info = info_of(tmp_path / name)
            assert info["dpi"] == pytest.approx((300, 150), abs=0.1) and "exif" not in info
    Image.fromarray(piece).save(tmp_path / "in.jpg", dpi=(300, 300), exif=make_exif(1))
    lowtide.denoise(tmp_path / "in.jpg", tmp_path / "out.jpg", sigma=0, force=True, budget=BUDGET)
    assert info_of(tmp_path / "out.jpg")["maker"] == "Maker"


XMP = """<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF
 xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#"><rdf:Description rdf:about=""
 xmlns:Container="http://ns.google.com/photos/1.0/container/"
 xmlns:Item="http://ns.google.com/photos/1.0/container/item/"
 xmlns:hdrgm="http://ns.adobe.com/hdr-gain-map/1.0/" xmlns:dc="http://purl.org/dc/elements/1.1/"
 xmlns:GCamera="http://ns.google.com/photos/1.0/camera/"
 hdrgm:Version="1.0" GCamera:MotionPhoto="1" GCamera:ShotLog="x" dc:title="kept">
 <Container:Directory>
 <rdf:Seq><rdf:li rdf:parseType="Resource"><Container:Item Item:Semantic="GainMap"/></rdf:li>
 </rdf:Seq></Container:Directory></rdf:Description></rdf:RDF></x:xmpmeta>"""


def jpeg_with(path, piece, *segments):
    Image.fromarray(piece).save(path, quality=95)
    data, made = path.read_bytes(), b""
    for marker, content in segments:
        made += bytes([0xFF, marker]) + struct.pack(">H", 2 + len(content)) + content
    path.write_bytes(data[:2] + made + data[2:])
    return path


def test_parts_beside_the_picture_are_named_and_not_announced(piece, tmp_path):
    xmp = 0xE1, b"http://ns.adobe.com/xap/1.0/\0" + XMP.encode()
    entries = struct.pack(">HHLLHHLL", 0xB000, 7, 4, 0x30313030, 0xB001, 4, 1, 4)
    mpf = 0xE2, b"MPF\0MM\0*\0\0\0\x08" + struct.pack(">H", 2) + entries + b"\0" * 4
    source = jpeg_with(tmp_path / "in.jpg", piece, xmp, mpf)
    report = upscaled(source, tmp_path / "out.jpg")
    words = " | ".join(report.notes)
    assert "gain map of HDR (Ultra HDR) is not kept" in words
    assert "2 more pictures of the file not read" in words
    assert "the video of a motion photo is not kept" in words
    written = (tmp_path / "out.jpg").read_bytes()
    for gone in (b"hdrgm", b"Container:", b"GainMap", b"MotionPhoto"):
        assert gone not in written
    assert b'dc:title="kept"' in written and b'GCamera:ShotLog="x"' in written


def test_xmp_without_parts_stays_byte_by_byte():
    for plain in (b"<x:xmpmeta/>", XMP.replace("http://ns.", "http://my.").encode(), b"\0\xff<"):
        assert strip_part_marks(plain) == plain


def test_the_first_picture_of_an_animated_png_is_read_with_a_note(piece, tmp_path):
    frames = [Image.fromarray(piece), Image.fromarray(255 - piece)]
    frames[0].save(tmp_path / "in.png", save_all=True, append_images=frames[1:])
    report = upscaled(tmp_path / "in.png", tmp_path / "out.png")
    assert "the first picture of an animation is read" in report.notes


def test_texts_of_a_png_are_kept_in_a_png_and_named_elsewhere(piece, tmp_path, save):
    source = save(tmp_path / "in.png", piece)
    texts = {"tEXt": b"parameters\0a cup", "iTXt": b"Title\0\0\0\0\0" + "Чашка".encode()}
    with_chunks(source, **texts)
    upscaled(source, tmp_path / "out.png")
    info = info_of(tmp_path / "out.png")
    assert info["parameters"] == "a cup" and str(info["Title"]) == "Чашка"
    report = upscaled(source, tmp_path / "out.jpg")
    words = "JPEG files are written without the texts of a PNG: parameters, Title"
    assert words in report.notes
    upscaled(source, tmp_path / "out.png", strip_metadata=True)
    assert "parameters" not in info_of(tmp_path / "out.png")


def test_exif_of_a_tiff_is_named(piece, tmp_path):
    Image.fromarray(piece).save(tmp_path / "in.tif", exif=make_exif(1))
    report = upscaled(tmp_path / "in.tif", tmp_path / "out.jpg")
    assert "EXIF of a TIFF is not read" in report.notes
