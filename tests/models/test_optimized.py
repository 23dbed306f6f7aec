"""Faster window transformers, compared with spandrel's."""

import copy
import functools
import importlib

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide.models.optimized import replace as adapting
from lowtide.models.optimized.narrow_conv import DeferredLayers, OptimizedTail
from lowtide.models.optimized.replace import replace_modules
from lowtide.models.optimized.swin_blocks import OptimizedWindowAttention
from lowtide.models.optimized.token_linear import (
    OptimizedFirstConv,
    OptimizedModule,
    OptimizedPatchEmbed,
    OptimizedPointwiseConv,
)
from lowtide.streaming.capture.export_graph import capture_graph
from support.window_transformers import HOMES, MORE, network


@pytest.fixture(scope="module", params=list(MORE))
def both(request):
    plain = network(request.param)
    fast = copy.deepcopy(plain)
    found = replace_modules(fast)
    assert found["Linear"] > 0
    assert len(found) > 1
    # A tail is one part that runs layers of two places.
    parts = sum(isinstance(one, OptimizedModule) for one in fast.modules())
    assert sum(found.values()) + found["tail"] == parts
    return plain, fast


@pytest.mark.grid(3)
# The second is the size that they were trained at.
@pytest.mark.parametrize("size", [(24, 40), (32, 32), (8, 8), (16, 8), (40, 64)])
def test_they_give_the_same_values(both, size):
    plain, fast = both
    image = torch.rand(1, 3, *size)
    with torch.inference_mode():
        expected, found = plain(image), fast(image)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_no_part_runs_as_it_was(both, monkeypatch):
    def never(*_, **__):
        raise AssertionError("the part that was replaced ran")

    # Where pixels of a channel lie together already, a convolution is right, and so are the last
    # layers of a small image; how they begin is the same in another layout.
    same = (
        OptimizedPointwiseConv,
        OptimizedTail,
        DeferredLayers,
        OptimizedFirstConv,
        OptimizedPatchEmbed,
    )
    for part in both[1].modules():
        if isinstance(part, OptimizedModule) and not isinstance(part, same):
            monkeypatch.setattr(part.plain, "forward", never)
    for size in ((24, 40), (32, 32)):
        with torch.inference_mode():
            both[1](torch.rand(1, 3, *size))


@pytest.mark.parametrize("family", ["SwinIR", "DRCT", "HAT"])
@pytest.mark.parametrize("images", [1, 2])
def test_channels_of_a_pixel_stay_side_by_side(family, images):
    fast = network(family)
    replace_modules(fast)
    seen = []

    def check(_, given, result):
        seen.extend(one.is_contiguous() for one in (*given, result) if one.dim() == 3)

    for layer in fast.modules():
        if isinstance(layer, torch.nn.LayerNorm):
            layer.register_forward_hook(check)
    with torch.inference_mode():
        fast(torch.rand(images, 3, 24, 40))
    assert seen and all(seen)


def test_a_batch_is_its_images(both):
    plain, fast = both
    images = torch.rand(3, 3, 24, 16)
    with torch.inference_mode():
        torch.testing.assert_close(fast(images), plain(images), rtol=0, atol=2e-6)


def test_in_fp64_they_differ_by_rounding(both):
    plain, fast = (copy.deepcopy(one).double() for one in both)
    image = torch.rand(1, 3, 24, 40, dtype=torch.float64)
    with torch.inference_mode():
        expected, found = plain(image), fast(image)
    assert (found - expected).abs().max() <= 1e-12 * expected.abs().max()


def test_tensors_keep_their_names(both):
    plain, fast = both
    assert list(fast.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in fast.named_parameters()] == [
        name for name, _ in plain.named_parameters()
    ]


def make_masks_once(model, monkeypatch):
    """PyTorch 2.11 has the masks of every block in a graph, later ones each of them once."""
    made = {}

    def once(part, make, *given, **named):
        key = repr((part.window_size, part.shift_size, given, named))
        if key not in made:
            made[key] = make(*given, **named)
        return made[key]

    for part in model.modules():
        if make := getattr(part, "calculate_mask", None):
            monkeypatch.setattr(part, "calculate_mask", functools.partial(once, part, make))


@pytest.mark.grid(4)
def test_an_exported_graph_is_that_of_the_model_itself(both, monkeypatch):
    plain, fast = both
    make_masks_once(plain, monkeypatch)
    image = torch.rand(1, 3, 24, 40)
    names = [
        [str(node.target) for node in capture_graph(one, image).nodes if node.kind == "call"]
        for one in (plain, fast)
    ]
    assert names[0] == names[1]


@pytest.mark.grid(2)
@pytest.mark.parametrize("family", ["SwinIR", "DRCT"])
def test_a_capture_makes_masks_of_each_kind_once(family, monkeypatch):
    home = importlib.import_module(f"spandrel.architectures.{family}.__arch.{HOMES[family]}")
    made, plain = [], home.SwinTransformerBlock.calculate_mask

    def counted(self, *more):
        made.append(self.shift_size)
        return plain(self, *more)

    monkeypatch.setattr(home.SwinTransformerBlock, "calculate_mask", counted)
    fast = network(family)
    replace_modules(fast)
    for _ in range(2):
        made.clear()
        capture_graph(fast, torch.rand(1, 3, 24, 40))
        assert sorted(made) == [0, 4]


def test_a_part_that_gives_other_numbers_is_not_taken(monkeypatch):
    class Wrong(OptimizedWindowAttention):
        def forward(self, x, rpi=None, mask=None):
            return super().forward(x, rpi, mask) * 1.001

    kinds = {"SwinIR WindowAttention": (Wrong, adapting._swin)}
    monkeypatch.setattr(adapting, "_KINDS", kinds)
    monkeypatch.setattr(
        OptimizedTail, "in_strips", lambda self, x, rows: self.plain(self.before(x)) + 1
    )
    plain = network("SwinIR")
    fast = copy.deepcopy(plain)
    assert set(replace_modules(fast)) == {"Linear", "Conv2d to few channels"}
    image = torch.rand(1, 3, 24, 16)
    with torch.inference_mode():
        torch.testing.assert_close(fast(image), plain(image), rtol=0, atol=1e-6)


def test_other_models_are_left_alone():
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 3, 3), torch.nn.MultiheadAttention(8, 2))
    assert not replace_modules(module)
    assert [type(one) for one in module] == [torch.nn.Conv2d, torch.nn.MultiheadAttention]


def test_blocks_that_drop_paths_at_another_rate_are_compared_once(monkeypatch):
    compared, agrees = [], adapting._gives_same_output
    monkeypatch.setattr(
        adapting,
        "_gives_same_output",
        lambda plain, *more: compared.append(plain) or agrees(plain, *more),
    )
    net = network("DRCT")
    kinds = [type(part).__name__ for part in net.modules()]
    assert kinds.count("SwinTransformerBlock") == 10
    assert 0 < kinds.count("DropPath") < 20
    assert replace_modules(net)["DRCT SwinTransformerBlock"] == 10
    # Five widths, in each of two groups.
    assert [type(part).__name__ for part in compared].count("SwinTransformerBlock") == 5


@pytest.mark.parametrize("family", ["SwinIR", "DRCT"])
def test_gradients_pass_after_a_run_without_them(family):
    plain = network(family)
    fast = copy.deepcopy(plain)
    replace_modules(fast)
    image = torch.rand(1, 3, 24, 40)
    with torch.inference_mode():
        fast(image)  # what is kept for the next run is made here
    gradients = []
    for one in (plain, fast):
        given = image.clone().requires_grad_()
        one(given).square().sum().backward()
        gradients.append(given.grad)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["SwinIR", "DRCT", "HAT"])
def test_their_memory_is_traced(family):
    fast = network(family, embed_dim=60)  # heads of 30 channels
    replace_modules(fast)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.inference_mode():
        made = fast(mode.from_tensor(torch.rand(1, 3, 24, 40)))
    assert made.shape == (1, 3, 48, 80)


@pytest.mark.parametrize(("family", "home"), [("ATD", "atd_arch"), ("DCTLSA", "dctlsa")])
def test_kin_whose_tokens_are_made_otherwise_are_left_so(family, home):
    small = {"embed_dim": 36, "depths": (2, 2), "num_heads": (2, 2), "window_size": 8}
    options = {**small, "category_size": 32, "num_tokens": 16} if family == "ATD" else {}
    made = importlib.import_module(f"spandrel.architectures.{family}.__arch.{home}")
    plain = getattr(made, family)(**options).eval()
    fast, image = copy.deepcopy(plain), torch.rand(1, 3, 24, 40)
    assert not {f"{family} PatchEmbed", f"{family} PatchUnEmbed", "first"} & set(
        replace_modules(fast)
    )
    with torch.inference_mode():
        torch.testing.assert_close(fast(image), plain(image), rtol=0, atol=2e-6)
