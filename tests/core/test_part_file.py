"""Files that appear whole or not at all."""

import pytest

from lowtide.core.part_file import PART_PATTERN, part_of, replacing


def test_a_file_is_replaced_when_the_block_ends(tmp_path):
    target = tmp_path / "a.json"
    target.write_text("old")
    with replacing(target) as part:
        part.write_text("new")
        assert target.read_text() == "old"
        assert list(tmp_path.glob(PART_PATTERN)) == [part] == [part_of(target)]
    assert target.read_text() == "new"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_what_was_there_stays_when_the_block_fails(tmp_path, error):
    target = tmp_path / "a.json"
    target.write_text("old")
    with pytest.raises(error), replacing(target) as part:
        part.write_text("half")
        raise error
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_file_that_cannot_be_renamed_leaves_nothing_beside_it(tmp_path):
    target = tmp_path / "a.json"
    target.mkdir()
    with pytest.raises(OSError), replacing(target) as part:
        part.write_text("new")
    assert list(tmp_path.iterdir()) == [target]


def test_the_error_of_the_block_is_raised_where_nothing_was_written(tmp_path):
    with pytest.raises(FileNotFoundError), replacing(tmp_path / "none" / "a.json") as part:
        part.write_text("new")
