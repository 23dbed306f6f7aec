import json

import pytest

from lowtide.models import ModelDescriptor, SizeRule


@pytest.mark.grid(3)
@pytest.mark.parametrize("minimum", [0, 5, 16])
@pytest.mark.parametrize("multiple_of", [1, 4, 7])
@pytest.mark.parametrize("square", [False, True])
def test_same_as_spandrel(minimum: int, multiple_of: int, square: bool) -> None:
    from spandrel import SizeRequirements

    ours = SizeRule(minimum, multiple_of, square)
    theirs = SizeRequirements(minimum, multiple_of, square)
    assert ours.minimum == theirs.minimum
    for height in range(1, 30):
        for width in range(1, 30):
            columns, rows = theirs.get_padding(width, height)
            assert ours.padding(height, width) == (rows, columns)


def test_examples() -> None:
    assert SizeRule().padding(1, 1000) == (0, 0)
    assert SizeRule(minimum=16, multiple_of=8).padding(3, 17) == (13, 7)
    assert SizeRule(multiple_of=4, square=True).padding(5, 10) == (7, 2)


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple_of"):
        SizeRule(multiple_of=0)
    with pytest.raises(ValueError, match="empty"):
        SizeRule().padding(0, 4)


def test_descriptor_is_json() -> None:
    facts = ModelDescriptor(
        name="a",
        architecture="B",
        purpose="SR",
        scale=2,
        in_channels=3,
        out_channels=3,
        size=SizeRule(8, 8),
        supports_half=False,
        supports_bfloat16=True,
        tiling="supported",
        tags=("x",),
        parameters=1,
        weight_bytes=4,
        sha256="0",
        license=None,
        path=None,
    )
    values = facts.to_dict()
    assert json.loads(json.dumps(values)) == values
    assert values["size"] == {"minimum": 8, "multiple_of": 8, "square": False}
    assert facts.dtypes == ("float64", "float32", "bfloat16")
