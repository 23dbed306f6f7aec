"""The name that somebody meant."""

import pytest

from lowtide.core.errors import closest_name, hint_for_name


@pytest.mark.parametrize(
    ("name", "meant"), [("tran", "train"), ("vall", "val"), ("train", "train"), ("zzz", None)]
)
def test_the_nearest_name(name, meant):
    assert closest_name(name, iter(("train", "val", "scale"))) == meant


def test_a_hint_names_the_nearest_or_all():
    assert hint_for_name("tran", ("train", "val")) == "did you mean 'train'?"
    assert hint_for_name("zzz", iter(("train", "val"))) == "use one of train, val"
