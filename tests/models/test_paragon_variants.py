"""ParagonSR2 from nano to xl: shapes, counts, gradients, files, and bands equal to the whole."""

import pytest
import torch
from safetensors.torch import load_file, save_file

import lowtide
from lowtide import ModelError
from lowtide.models import lowtide_files
from lowtide.models.paragonsr2.config import VARIANTS, VariantConfig
from lowtide.models.paragonsr2.variant import ParagonVariant

# Learned values at x2, without and with attention in windows.
COUNTS = {
    "nano": (10_282, 11_890),
    "micro": (18_606, 20_574),
    "tiny": (40_783, 43_183),
    "xs": (73_564, 76_720),
    "s": (191_908, 213_476),
    "m": (1_289_636, 1_600_676),
    "l": (5_153_716, 6_529_204),
    "xl": (14_481_476, 18_521_156),
}
SMALL = VARIANTS[:5]


def variant(name, scale=2, **changes):
    torch.manual_seed(0)
    changes = {"attention": "window", **changes}
    return ParagonVariant(VariantConfig.of(name, scale, **changes)).eval()


def count(name, attention):
    with torch.device("meta"):
        network = ParagonVariant(VariantConfig.of(name, 2, attention=attention))
    return sum(weight.numel() for weight in network.parameters())


def test_attention_is_there_where_it_was_seen_to_help():
    by_default = {name: VariantConfig.of(name, 2).attention for name in VARIANTS}
    small = dict.fromkeys(("nano", "micro", "tiny", "xs"), "none")
    assert by_default == {**dict.fromkeys(VARIANTS, "window"), **small}
    assert VariantConfig.of("nano", 2, attention="hierarchical").attention == "hierarchical"


@pytest.mark.parametrize("name", VARIANTS)
def test_learned_values(name):
    assert (count(name, "none"), count(name, "window")) == COUNTS[name]


@pytest.mark.parametrize("name", ["nano", "s"])
@pytest.mark.parametrize("scale", [1, 2, 3, 4, 8])
@torch.no_grad()
def test_every_scale_at_any_size(name, scale):
    network = variant(name, scale)
    for height, width in ((7, 11), (40, 33)):
        image = torch.rand(2, 3, height, width)
        result = network(image)
        assert result.shape == (2, 3, height * scale, width * scale)
        # Before training it is the fixed path and a little more.
        assert 0 < (result - network.base(image)).std() < 0.15


@pytest.mark.parametrize("name", ["m", "l", "xl"])
@torch.no_grad()
def test_the_deep_ones_run(name):
    result = variant(name)(torch.rand(1, 3, 9, 8))
    assert result.shape == (1, 3, 18, 16)
    assert result.isfinite().all()


@pytest.mark.grid(3)
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("attention", ["none", "window", "hierarchical"])
@pytest.mark.parametrize("form", ["halo", "blended"])
def test_every_weight_learns(name, attention, form):
    network = variant(name, attention=attention, form=form, window=16, shared=4).train()
    image = torch.rand(1, 3, 37, 29)
    (network(image) - torch.rand(1, 3, 74, 58)).square().mean().backward()
    silent = [
        name
        for name, weight in network.named_parameters()
        if weight.grad is None or not weight.grad.any()
    ]
    # A bias of keys moves all scores of a query alike; it is a third of one tensor.
    assert not silent


@pytest.mark.parametrize(("attention", "sees"), [("window", True), ("none", False)])
@pytest.mark.parametrize("height", [33, 40, 57, 64])
@torch.no_grad()
def test_attention_covers_the_last_row_at_every_size(height, attention, sees):
    """The seed's left the last rows of a third of all sizes out."""
    network = variant("tiny", attention=attention, modulation=False).double()
    image = torch.rand(1, 3, height, 30, dtype=torch.float64)
    changed, step, margin = image.clone(), 24, 4
    first = (height - 1) // step * step - margin  # of what the last window sees
    changed[:, :, first] = 1 - changed[:, :, first]
    # Too far away for the convolutions.
    differs = network.detail(changed)[:, :, -1] != network.detail(image)[:, :, -1]
    assert bool(differs.any()) == sees


def test_the_gain_of_a_plain_image():
    network = variant("nano")
    gain = network.gain(torch.rand(3, 3, 20, 30))
    assert gain.shape == (3, 1, 1, 1)
    assert ((gain > 0.05) & (gain < 0.2)).all()


@pytest.mark.grid(4)
@pytest.mark.parametrize("name", ["nano", "tiny", pytest.param("s", marks=pytest.mark.slow)])
@pytest.mark.parametrize("attention", ["none", "window", "hierarchical"])
@torch.no_grad()
def test_bands_give_what_the_whole_gives(name, attention):
    network = variant(name, attention=attention)
    image = torch.rand(1, 3, 150, 97)
    small = lowtide.stream(network, budget="22MiB" if name == "nano" else "28MiB")
    assert (small(image) - network(image)).abs().max() < 2e-6
    assert max(small.prepare(image).layout.bands) > 1


def test_a_file_holds_all_that_there_is_to_know(tmp_path):
    network = variant("tiny", 4, form="blended")
    path = tmp_path / "4x_mine.safetensors"
    save_file(network.state_dict(), path, lowtide_files.metadata_for(network.config))
    model = lowtide.load(path)
    facts = model.descriptor
    assert isinstance(model.module, ParagonVariant)
    assert model.module.config == network.config
    assert (facts.architecture, facts.scale, facts.tiling) == ("ParagonSR2", 4, "discouraged")
    assert facts.tags == ("tiny", "24nf", "1x1", "blended windows")
    image = torch.rand(1, 3, 21, 17)
    with torch.no_grad():
        assert torch.equal(model(image), network(image).clamp(0, 1))
    described = lowtide_files.describe_file(path, lowtide_files.read_metadata(path), "mine", "")
    assert described.parameters == facts.parameters
    assert described.weight_bytes == facts.weight_bytes


@pytest.mark.parametrize("scale", [1, 2, 3, 4, 8])
def test_constants_are_counted(scale):
    network = variant("nano", scale)
    assert network.config.buffer_elements == sum(one.numel() for one in network.buffers())


def test_weights_of_another_variant_are_refused(tmp_path):
    path = tmp_path / "mine.safetensors"
    save_file(variant("nano").state_dict(), path)
    other = VariantConfig.of("tiny", 2, attention="window")
    save_file(load_file(path), path, lowtide_files.metadata_for(other))
    with pytest.raises(ModelError, match="do not fit its metadata"):
        lowtide.load(path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scale": 5}, "not by 5"),
        ({"band": 8}, "odd"),
        ({"features": 4}, "at least 8"),
        ({"attention": "windows"}, "window, hierarchical, none"),
        ({"form": "hann"}, "halo"),
        ({"alpha": 1.5}, "alpha"),
        ({"blocks": 0}, "at least 1"),
    ],
)
def test_shapes_that_make_no_network(changes, words):
    with pytest.raises(ModelError, match=words):
        VariantConfig.of(**{"variant": "nano", "scale": 2, **changes})


def test_an_unknown_variant_is_named():
    with pytest.raises(ModelError, match="nano, micro, tiny"):
        VariantConfig.of("mini", 2)
