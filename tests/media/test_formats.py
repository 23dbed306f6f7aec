from __future__ import annotations

import pytest

from lowtide import OutputError, UsageError
from lowtide.media import FORMATS, output_sample, require_format_holds
from lowtide.media.formats import AVIF, JPEG, PNG, TIFF, WEBP, format_of_suffix
from lowtide.media.image_info import ImageInfo


@pytest.mark.parametrize("suffix", ["png", ".PNG", "Png"])
def test_a_suffix_is_found_in_any_case_with_or_without_its_dot(suffix: str) -> None:
    assert format_of_suffix(suffix) is PNG


@pytest.mark.parametrize("name", ["a.gif", "a", "a.png.bak"])
def test_an_unknown_output_suffix_is_a_usage_error_that_lists_the_known(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        require_format_holds(name, ImageInfo(1, 1, 3))
    assert ".webp" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("name", "side"), [("a.jpg", 65_500), ("a.webp", 16_383), ("a.avif", 16_384)]
)
def test_the_side_limit_is_exact_and_the_hint_names_formats_that_work(name: str, side: int) -> None:
    require_format_holds(name, ImageInfo(side, 1, 3))
    with pytest.raises(OutputError, match=f"{side:,} on a side") as caught:
        require_format_holds(name, ImageInfo(1, side + 1, 3))
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("write PNG or TIFF")


def test_transparency_is_refused_for_jpeg_only() -> None:
    for entry in filter(lambda one: one.save, FORMATS):
        if entry is JPEG:
            with pytest.raises(OutputError, match="transparency"):
                require_format_holds("a.jpg", ImageInfo(4, 4, 4))
        else:
            require_format_holds("a" + entry.suffixes[0], ImageInfo(4, 4, 2))


def test_sample_types_are_kept_where_the_format_can() -> None:
    assert output_sample(PNG, "uint16") == ("uint16", None)
    assert output_sample(TIFF, "float32") == ("float32", None)
    assert output_sample(AVIF, "uint8") == ("uint8", None)


@pytest.mark.parametrize("entry", [JPEG, WEBP])
def test_8_bit_formats_say_that_they_round(entry: object) -> None:
    sample, note = output_sample(entry, "uint16")  # pyright: ignore[reportArgumentType]
    assert sample == "uint8"
    assert "8 bits" in (note or "")


def test_avif_says_that_it_holds_12_bits() -> None:
    sample, note = output_sample(AVIF, "uint16")
    assert (sample, "12 bits" in (note or "")) == ("uint16", True)
