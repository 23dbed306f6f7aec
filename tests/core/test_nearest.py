"""The name that somebody meant."""

import pytest

from lowtide.core.nearest import hint_for, nearest


@pytest.mark.parametrize(
    ("name", "meant"), [("tran", "train"), ("vall", "val"), ("train", "train"), ("zzz", None)]
)
def test_the_nearest_name(name, meant):
    assert nearest(name, iter(("train", "val", "scale"))) == meant


def test_a_hint_names_the_nearest_or_all():
    assert hint_for("tran", ("train", "val")) == "did you mean 'train'?"
    assert hint_for("zzz", iter(("train", "val"))) == "use one of train, val"
