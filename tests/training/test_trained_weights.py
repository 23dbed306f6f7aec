"""Files of trained weights: the same bytes each time, and no half ones."""

import pytest

import lowtide
from lowtide import OutputError
from lowtide.training.setup import make_generator, save_weights
from lowtide.training.tasks.sr_config import SrConfig

NETWORK = {"type": "paragonconv", "features": 32, "blocks": 1}


@pytest.fixture
def save(tmp_path):
    config = SrConfig.from_values(
        {
            "name": "mine",
            "scale": 2,
            "datasets": {"train": {"dataroot_gt": ["none"]}},
            "network_g": NETWORK,
            "train": {"total_iter": 1},
        }
    )
    network = make_generator(NETWORK, 2, seed=0)
    return lambda name="a.safetensors": save_weights(tmp_path / name, network, config)


def test_the_same_weights_are_the_same_bytes(save):
    assert len({save(f"{number}.safetensors").read_bytes() for number in range(6)}) == 1
    assert lowtide.load(save()).descriptor.architecture == "ParagonConv"


def test_a_full_disk_is_named_and_leaves_what_was_there(save, tmp_path):
    resource = pytest.importorskip("resource", reason="limits files as Unix does")
    before = save().read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(OutputError, match=r"a\.safetensors: the disk is full") as caught:
            save()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "free some space" in (caught.value.hint or "")
    assert (tmp_path / "a.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]
