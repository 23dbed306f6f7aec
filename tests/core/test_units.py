import pytest

from lowtide import UsageError
from lowtide.core.units import format_bytes, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("6GiB", 6 << 30),
        ("900 MB", 900_000_000),
        ("512m", 512 << 20),
        ("1.5g", 3 << 29),
        (77, 77),
        (" .5 KiB ", 512),
        ("2tb", 2 * 10**12),
    ],
)
def test_parses_what_people_write(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "six", "-1GiB", "0", "0.1", "1 gigabyte", "1e9", "nan"])
def test_refuses_the_rest_by_name(text):
    with pytest.raises(UsageError, match="budget"):
        parse_bytes(text, what="budget")


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (10 << 20, "10.0 MiB"),
        (1023.9 * 2**20, "1.00 GiB"),
        (-(5 << 30), "-5.00 GiB"),
        (3 << 50, "3072 TiB"),
    ],
)
def test_formats_with_three_digits(count, text):
    assert format_bytes(count) == text


def test_formats_seconds_as_people_read_them():
    assert [format_seconds(s) for s in (0.04, 59.9, 60, 3599.6, 4210)] == [
        "0.0 s",
        "59.9 s",
        "1:00",
        "1:00:00",
        "1:10:10",
    ]
