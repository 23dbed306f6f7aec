"""Faster parts of spandrel's window transformers, beside the parts they stand for."""

import copy
import importlib

import pytest
import torch

from lowtide.memory.measuring.live import live_peak_bytes
from lowtide.models.fast import adapt as adapting
from lowtide.models.fast import swin, tail
from lowtide.models.fast.adapt import adapt
from lowtide.models.fast.masks import ShiftMask, WindowOrder
from lowtide.models.fast.part import FastPart
from lowtide.models.fast.swin import FastBlock, FastWindows
from lowtide.models.fast.tail import Deferred, FastTail
from lowtide.models.fast.tokens import FastPointwise
from lowtide.models.low_precision import Edge, lower
from lowtide.streaming.bands.capture import capture

SWIN = {
    "upscale": 2, "img_size": 32, "depths": [2, 2], "num_heads": [2, 2], "embed_dim": 36,
    "mlp_ratio": 2, "img_range": 1.0, "upsampler": "pixelshuffle", "resi_connection": "1conv",
}  # fmt: skip
MORE = {
    "SwinIR": {"window_size": 8}, "DRCT": {"window_size": 8, "gc": 12},
    "HAT": {
        "window_size": 8, "compress_ratio": 3, "squeeze_factor": 6, "conv_scale": 0.01,
        "overlap_ratio": 0.5,
    },
    "CRAFT": {},
}  # fmt: skip
HOMES = {"SwinIR": "SwinIR", "DRCT": "drct_arch", "HAT": "HAT", "CRAFT": "CRAFT"}


def network(family):
    torch.manual_seed(0)
    home = importlib.import_module(f"spandrel.architectures.{family}.__arch.{HOMES[family]}")
    options = {"embed_dim": 32, "depths": [1, 1], "num_heads": [4, 4]} if family == "CRAFT" else (
        SWIN | MORE[family]
    )
    made = getattr(home, family)(**options).eval().requires_grad_(False)
    for weight in made.parameters():
        if weight.dim() == 1:
            weight.add_(torch.randn(weight.shape) * 0.1)
        elif weight.shape[-1] == 2:
            weight.normal_()  # tables of biases, which are nearly 0 at first
    return made


@pytest.fixture(scope="module", params=list(MORE))
def both(request):
    plain = network(request.param)
    fast = copy.deepcopy(plain)
    found = adapt(fast)
    assert found["Linear"] > 0
    assert len(found) > 1
    # A tail is one part that runs layers of two places.
    parts = sum(isinstance(one, FastPart) for one in fast.modules())
    assert sum(found.values()) + found["tail"] == parts
    return plain, fast


# The second is the size that they were trained at.
@pytest.mark.parametrize("size", [(24, 40), (32, 32), (8, 8), (16, 8), (40, 64)])
def test_they_give_the_same_numbers(both, size):
    plain, fast = both
    image = torch.rand(1, 3, *size)
    with torch.inference_mode():
        expected, found = plain(image), fast(image)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_no_part_runs_as_it_was(both, monkeypatch):
    def never(*_, **__):
        raise AssertionError("the part that was replaced ran")

    for part in both[1].modules():
        # Where pixels of a channel lie together already, a convolution is right, and so are the
        # last layers of a small image.
        if isinstance(part, FastPart) and not isinstance(part, (FastPointwise, FastTail, Deferred)):
            monkeypatch.setattr(part.plain, "forward", never)
    for size in ((24, 40), (32, 32)):
        with torch.inference_mode():
            both[1](torch.rand(1, 3, *size))


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


def test_an_exported_graph_is_that_of_the_model_itself(both):
    plain, fast = both
    image = torch.rand(1, 3, 24, 40)
    names = [
        [str(node.target) for node in capture(one, image).nodes if node.kind == "call"]
        for one in (plain, fast)
    ]
    assert names[0] == names[1]


@pytest.mark.parametrize("family", ["SwinIR", "DRCT"])
def test_a_capture_makes_masks_of_each_kind_once(family, monkeypatch):
    home = importlib.import_module(f"spandrel.architectures.{family}.__arch.{HOMES[family]}")
    made, plain = [], home.SwinTransformerBlock.calculate_mask

    def counted(self, *more):
        made.append(self.shift_size)
        return plain(self, *more)

    monkeypatch.setattr(home.SwinTransformerBlock, "calculate_mask", counted)
    fast = network(family)
    adapt(fast)
    for _ in range(2):
        made.clear()
        capture(fast, torch.rand(1, 3, 24, 40))
        assert sorted(made) == [0, 4]


@pytest.mark.parametrize("size", [(1, 1), (1, 4), (3, 2)])
@pytest.mark.parametrize(("window", "shift"), [(4, 2), (6, 1), (4, 0)])
def test_masks_in_few_forms_are_those_of_the_definition(size, window, shift):
    rows, columns = size[0] * window, size[1] * window
    regions = torch.zeros(rows, columns)
    edges = slice(0, -window), slice(-window, -shift), slice(-shift, None)
    for number, (down, across) in enumerate((a, b) for a in edges for b in edges):
        regions[down, across] = number
    flat = regions.view(size[0], window, size[1], window).transpose(1, 2).reshape(-1, window**2)
    expected = torch.zeros(len(flat), window**2, window**2)
    expected[flat[:, None] != flat[:, :, None]] = -100.0
    mask = ShiftMask(rows, columns, window, shift)
    assert torch.equal(mask.dense(expected), expected)
    patterns = mask.patterns(expected)
    assert sorted(place for one in patterns for place in one.places) == list(range(len(flat)))
    assert len(patterns) <= 4


def test_a_part_that_gives_other_numbers_is_not_taken(monkeypatch):
    class Wrong(FastWindows):
        def forward(self, x, rpi=None, mask=None):
            return super().forward(x, rpi, mask) * 1.001

    kinds = {"SwinIR WindowAttention": (Wrong, adapting._swin)}
    monkeypatch.setattr(adapting, "_KINDS", kinds)
    monkeypatch.setattr(FastTail, "in_strips", lambda self, x, rows: self.plain(self.before(x)) + 1)
    plain = network("SwinIR")
    fast = copy.deepcopy(plain)
    assert set(adapt(fast)) == {"Linear"}
    image = torch.rand(1, 3, 24, 16)
    with torch.inference_mode():
        torch.testing.assert_close(fast(image), plain(image), rtol=0, atol=1e-6)


def test_masks_stay_tensors_where_one_attention_does(monkeypatch):
    agrees, seen = adapting._agrees, []

    def but_one(plain, fast, example):
        seen.extend([fast] if isinstance(fast, FastWindows) else [])
        return seen != [fast] and agrees(plain, fast, example)

    monkeypatch.setattr(adapting, "_agrees", but_one)
    plain = network("HAT")
    fast = copy.deepcopy(plain)
    assert set(adapt(fast)) == {"HAT OCAB", "HAT Mlp", "Linear", "Conv2d 1×1", "tail"}
    image = torch.rand(1, 3, 24, 16)
    with torch.inference_mode():
        torch.testing.assert_close(fast(image), plain(image), rtol=0, atol=2e-6)


def test_other_models_are_left_alone():
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 3, 3), torch.nn.MultiheadAttention(8, 2))
    assert not adapt(module)
    assert [type(one) for one in module] == [torch.nn.Conv2d, torch.nn.MultiheadAttention]


@pytest.mark.parametrize("family", ["SwinIR", "DRCT"])
def test_blocks_put_pixels_in_the_order_of_windows(family):
    fast = network(family)
    found = adapt(fast)
    assert found[f"{family} SwinTransformerBlock"] == found[f"{family} WindowAttention"] > 0


@pytest.mark.parametrize("family", ["SwinIR", "DRCT"])
@pytest.mark.parametrize("windows", [1, 3, 1 << 20])
def test_so_many_windows_at_a_time_give_the_same_numbers(family, windows, monkeypatch):
    plain = network(family)
    fast = copy.deepcopy(plain)
    adapt(fast)
    asked = []
    monkeypatch.setattr(swin, "at_once", lambda x, total: min(windows, total))
    attend = FastWindows.attend
    monkeypatch.setattr(
        FastWindows, "attend", lambda self, x, *more: asked.append(len(x)) or attend(self, x, *more)
    )
    image = torch.rand(1, 3, 40, 56)
    with torch.inference_mode():
        torch.testing.assert_close(fast(image), plain(image), rtol=0, atol=2e-6)
    # All parts of 5·7 windows are of one size.
    assert set(asked) == {min(windows, 35)}


@pytest.mark.parametrize("family", ["SwinIR", "DRCT"])
def test_blocks_overwrite_only_what_nothing_else_needs(family):
    fast = network(family)
    adapt(fast)
    blocks = [part for part in fast.modules() if isinstance(part, FastBlock)]
    kept = []

    def watch(block, given, result):
        kept.append(result.data_ptr() != given[0].data_ptr())

    for block in blocks:
        block.register_forward_hook(watch)
    with torch.inference_mode():
        fast(torch.rand(1, 3, 16, 24))
    # Two groups, each of which adds its result to what it was given.
    assert kept == [True, *[False] * (len(blocks) // 2 - 1)] * 2
    kept.clear()
    fast(torch.rand(1, 3, 16, 24))  # a gradient may be asked for what it was given
    assert len(kept) == len(blocks)
    assert all(kept)


@pytest.mark.parametrize("total", [1, 7, 64, 97, 100, 768])
@pytest.mark.parametrize("fitting", [1, 12, 22, 5000])
def test_parts_are_equal_and_little_is_run_twice(total, fitting, monkeypatch):
    monkeypatch.setattr(swin, "_PART_BYTES", fitting * swin._HELD * 4 * 16 * 4)
    some = swin.at_once(torch.empty(1, total * 4, 16), total)
    most = min(fitting, total)
    assert (most + 1) // 2 <= some <= most
    twice = -total % some
    assert all(-total % size >= twice for size in range((most + 1) // 2, most + 1))


@pytest.mark.parametrize("channels", [3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recording", [False, True])
def test_rows_are_put_where_they_belong(channels, dtype, recording):
    places = torch.randperm(50)[:20]
    rows = torch.randn(20, channels).to(dtype)
    found, expected = torch.zeros(2, 50, channels, dtype=dtype)
    with torch.set_grad_enabled(recording):
        swin._put(found, places, rows)
    expected[places] = rows
    assert torch.equal(found, expected)


def test_blocks_that_drop_paths_at_another_rate_are_compared_once(monkeypatch):
    compared, agrees = [], adapting._agrees
    monkeypatch.setattr(
        adapting, "_agrees", lambda plain, *more: compared.append(plain) or agrees(plain, *more)
    )
    net = network("DRCT")
    kinds = [type(part).__name__ for part in net.modules()]
    assert kinds.count("SwinTransformerBlock") == 10
    assert 0 < kinds.count("DropPath") < 20
    assert adapt(net)["DRCT SwinTransformerBlock"] == 10
    # Five widths, in each of two groups.
    assert [type(part).__name__ for part in compared].count("SwinTransformerBlock") == 5


def test_of_an_image_less_is_held_than_queries_keys_and_values():
    net = network("DRCT")
    adapt(net)
    block = max(
        (part for part in net.modules() if isinstance(part, FastBlock)),
        key=lambda part: part.plain.dim,
    )
    channels = block.plain.dim
    x = torch.randn(1, 512 * 512, channels)
    with torch.inference_mode():
        block(x, (512, 512))  # finds the order of windows
        taken = live_peak_bytes(lambda: block(x, (512, 512)))
    # The result, what some windows hold, and the pixels' order; all of them were more than 6.
    assert taken < 2.5 * x.numel() * 4


class Tailed(torch.nn.Module):
    """What is left of a model where its attention is left out."""

    def __init__(self, scale):
        super().__init__()
        torch.manual_seed(0)
        home = importlib.import_module("spandrel.architectures.SwinIR.__arch.SwinIR")
        self.upsample = home.Upsample(scale, 6)
        self.conv_last = torch.nn.Conv2d(6, 3, 3, padding=1)
        self.eval().requires_grad_(False)

    def forward(self, x):
        return self.conv_last(self.upsample(x))


@pytest.fixture(params=[2, 3, 4, 8])
def tails(request):
    plain = Tailed(request.param)
    fast = copy.deepcopy(plain)
    assert FastTail.fits(fast.upsample, fast.conv_last)
    fast.conv_last = FastTail(fast.conv_last, fast.upsample)
    fast.upsample = Deferred(fast.upsample)
    return plain, fast


@pytest.mark.parametrize("size", [(1, 6, 41, 9), (2, 6, 17, 5), (1, 6, 8, 8), (1, 6, 3, 30)])
def test_strips_of_the_last_layers_are_the_whole(tails, size, monkeypatch):
    monkeypatch.setattr(tail, "_STRIP_BYTES", 1)
    plain, fast = tails
    x = torch.randn(size)
    heights = []
    fast.conv_last.before[0].register_forward_pre_hook(
        lambda _, given: heights.append(given[0].shape[2])
    )
    with torch.inference_mode():
        expected = plain(x)
        torch.testing.assert_close(fast(x), expected, rtol=0, atol=1e-6)
    # Twelve rows at most, of which four see beyond their strip.
    assert (max(heights) <= 12) and (len(heights) > 1) == (size[2] > 8)
    assert plain.state_dict().keys() == fast.state_dict().keys()
    given = x.requires_grad_()
    fast(given).sum().backward()
    assert given.grad is not None


def test_strips_take_no_more_than_they_may(tails, monkeypatch):
    monkeypatch.setattr(tail, "_STRIP_BYTES", 1 << 20)
    plain, fast = tails
    x = torch.randn(1, 6, 400, 64)
    with torch.inference_mode():
        result = plain(x)
        assert live_peak_bytes(lambda: fast(x)) < result.nbytes + (6 << 20)
        assert live_peak_bytes(lambda: plain(x)) > 3 * result.nbytes


def test_the_last_convolution_stays_in_fp32_in_half_precision(tails):
    _, fast = tails
    x = torch.rand(1, 6, 20, 14)
    low = lower(fast, torch.bfloat16, x)
    assert isinstance(low.body.conv_last.plain, Edge)
    assert not low.reason
    with torch.inference_mode():
        expected, found = fast(x), low(x)
    assert found.dtype == torch.float32
    apart = (found - expected).abs().max()
    assert 0 < apart < 0.02 * expected.abs().max()


def test_other_last_layers_stay_as_they_are():
    conv, shuffle = torch.nn.Conv2d, torch.nn.PixelShuffle(2)
    before, last = torch.nn.Sequential(conv(6, 24, 3, padding=1), shuffle), conv(6, 3, 3, padding=1)
    assert FastTail.fits(before, last)
    for odd in (
        conv(6, 24, 3), conv(6, 24, 3, padding=2, dilation=2), conv(6, 24, 3, padding="same"),
        conv(6, 24, 3, padding=1, stride=2), conv(6, 24, 3, padding=1, padding_mode="reflect"),
        torch.nn.GroupNorm(1, 6),
    ):  # fmt: skip
        assert not FastTail.fits(torch.nn.Sequential(odd, shuffle), last)
    assert not FastTail.fits(before[:1], last)
    assert not FastTail.fits(before, torch.nn.Identity())


@pytest.mark.parametrize("size", [(1, 1), (1, 4), (3, 2)])
@pytest.mark.parametrize(("window", "shift"), [(4, 2), (6, 1), (4, 0)])
def test_the_order_of_windows(size, window, shift):
    height, width = size[0] * window, size[1] * window
    mask = ShiftMask(height, width, window, shift)
    order = WindowOrder.of(mask, torch.device("cpu"))
    pixels = torch.randn(height, width)
    there = pixels.flatten()[order.there].view(-1, window, window)
    assert torch.equal(order.there.sort()[0], torch.arange(height * width))
    rolled = pixels.roll((-shift, -shift), (0, 1)).unflatten(1, (-1, window))
    windows = rolled.unflatten(0, (-1, window)).transpose(1, 2).flatten(0, 1)
    dense, patterns = mask.dense(pixels), order.patterns(pixels)
    assert [one.places.start for one in patterns] == [
        sum(len(earlier.places) for earlier in patterns[:index]) for index in range(len(patterns))
    ]
    for one in patterns:
        for place in one.places:
            (original,) = [
                index for index, each in enumerate(windows) if torch.equal(each, there[place])
            ]
            added = dense[original] if one.added is None else one.added[0, 0]
            assert torch.equal(added, dense[original])
            assert one.added is not None or not dense[original].any()


def test_several_images_at_once_have_masks_in_few_forms(monkeypatch):
    fast = network("SwinIR")
    adapt(fast)

    def never(self, like):
        raise AssertionError("a mask of all windows was made")

    monkeypatch.setattr(ShiftMask, "dense", never)
    seen = []
    for part in fast.modules():
        if isinstance(part, FastBlock):
            monkeypatch.setattr(
                part.plain, "calculate_mask",
                lambda size, made=part.plain.calculate_mask: seen.append(made(size)) or seen[-1],
            )
    with torch.inference_mode():
        fast(torch.rand(2, 3, 24, 16))
    assert seen
    assert all(isinstance(mask, ShiftMask) for mask in seen)


@pytest.mark.parametrize("between", [torch.nn.GELU(), torch.nn.GELU("tanh"), torch.nn.ReLU()])
def test_what_lies_between_two_layers_is_what_the_model_has(between):
    home = importlib.import_module("spandrel.architectures.HAT.__arch.HAT")
    plain = torch.nn.ModuleDict({"mlp": home.Mlp(12, 30, act_layer=lambda: between)}).eval()
    fast = copy.deepcopy(plain)
    assert adapt(fast)["HAT Mlp"] == 1
    x = torch.randn(2, 40, 12)
    with torch.inference_mode():
        torch.testing.assert_close(fast["mlp"](x), plain["mlp"](x), rtol=0, atol=1e-6)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_convolutions_of_one_pixel_leave_tokens_as_they_lie(bias, dtype):
    plain = torch.nn.Conv2d(40, 7, 1, bias=bias).to(dtype)
    fast = FastPointwise(plain)
    tokens = torch.randn(2, 5, 6, 40, dtype=dtype)
    image = tokens.permute(0, 3, 1, 2)
    with torch.inference_mode():
        found = fast(image)
        torch.testing.assert_close(found, plain(image))
        torch.testing.assert_close(fast(image[0]), plain(image[0]))
        assert found.permute(0, 2, 3, 1).is_contiguous()
        # Pixels beside one another stay so.
        assert torch.equal(fast(image.contiguous()), plain(image.contiguous()))
        assert fast(image.contiguous()).is_contiguous()


def test_other_convolutions_are_no_layers_over_tokens():
    made = [
        torch.nn.Conv2d(4, 4, 3), torch.nn.Conv2d(4, 4, 1, stride=2),
        torch.nn.Conv2d(4, 4, 1, padding=1), torch.nn.Conv2d(4, 4, 1, groups=2),
        torch.nn.Conv2d(4, 4, 1, padding=1, padding_mode="reflect"), torch.nn.Linear(4, 4),
    ]  # fmt: skip
    assert not any(FastPointwise.fits(one) for one in made)
    assert FastPointwise.fits(torch.nn.Conv2d(4, 4, 1, padding="valid"))


@pytest.mark.parametrize("family", ["SwinIR", "DRCT"])
def test_gradients_pass_after_a_run_without_them(family):
    plain = network(family)
    fast = copy.deepcopy(plain)
    adapt(fast)
    image = torch.rand(1, 3, 24, 40)
    with torch.inference_mode():
        fast(image)  # what is kept for the next run is made here
    gradients = []
    for one in (plain, fast):
        given = image.clone().requires_grad_()
        one(given).square().sum().backward()
        gradients.append(given.grad)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-4)
