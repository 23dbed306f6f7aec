"""Blocks and groups of window transformers, some windows at a time, and their masks."""

import copy

import pytest
import torch

from lowtide.memory.live_peak import live_peak_bytes
from lowtide.memory.prediction.estimate import trace_step
from lowtide.memory.tracing.steps import InferenceStep
from lowtide.models.optimized import dense_group, swin_blocks
from lowtide.models.optimized import replace as adapting
from lowtide.models.optimized.dense_group import OptimizedDenseGroup
from lowtide.models.optimized.replace import replace_modules
from lowtide.models.optimized.shift_mask import ShiftMask, WindowOrder
from lowtide.models.optimized.swin_blocks import OptimizedSwinBlock, OptimizedWindowAttention
from support.window_transformers import network


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
    assert sorted(place for one in patterns for place in one.windows) == list(range(len(flat)))
    assert len(patterns) <= 4


def test_masks_stay_tensors_where_one_attention_does(monkeypatch):
    agrees, seen = adapting._gives_same_output, []

    def but_one(plain, fast, example):
        seen.extend([fast] if isinstance(fast, OptimizedWindowAttention) else [])
        return seen != [fast] and agrees(plain, fast, example)

    monkeypatch.setattr(adapting, "_gives_same_output", but_one)
    plain = network("HAT")
    fast = copy.deepcopy(plain)
    others = {
        "HAT OCAB",
        "HAT Mlp",
        "HAT PatchEmbed",
        "HAT PatchUnEmbed",
        "Linear",
        "Conv2d 1×1",
        "first",
        "tail",
    }
    assert set(replace_modules(fast)) == others
    image = torch.rand(1, 3, 24, 16)
    with torch.inference_mode():
        torch.testing.assert_close(fast(image), plain(image), rtol=0, atol=2e-6)


@pytest.mark.parametrize("family", ["SwinIR", "DRCT"])
def test_a_traced_network_runs_as_before(family):
    """The order of windows that a trace on fake tensors makes has no numbers."""
    fast = network(family)
    replace_modules(fast)
    image = torch.rand(1, 3, 40, 24)  # a size that no other test runs
    trace_step(fast, InferenceStep((image.to("meta"),)))
    with torch.inference_mode():
        torch.testing.assert_close(fast(image), network(family)(image), rtol=0, atol=2e-6)


def test_several_images_at_once_have_masks_in_few_forms(monkeypatch):
    fast = network("SwinIR")
    replace_modules(fast)

    def never(self, like):
        raise AssertionError("a mask of all windows was made")

    monkeypatch.setattr(ShiftMask, "dense", never)
    seen = []
    for part in fast.modules():
        if isinstance(part, OptimizedSwinBlock):
            monkeypatch.setattr(
                part.plain,
                "calculate_mask",
                lambda size, made=part.plain.calculate_mask: seen.append(made(size)) or seen[-1],
            )
    with torch.inference_mode():
        fast(torch.rand(2, 3, 24, 16))
    assert seen
    assert all(isinstance(mask, ShiftMask) for mask in seen)


@pytest.mark.parametrize("size", [(1, 1), (1, 4), (3, 2)])
@pytest.mark.parametrize(("window", "shift"), [(4, 2), (6, 1), (4, 0)])
def test_the_order_of_windows(size, window, shift):
    height, width = size[0] * window, size[1] * window
    mask = ShiftMask(height, width, window, shift)
    order = WindowOrder.of(mask, torch.device("cpu"))
    pixels = torch.randn(height, width)
    there = pixels.flatten()[order.pixel_indices].view(-1, window, window)
    assert torch.equal(order.pixel_indices.sort()[0], torch.arange(height * width))
    rolled = pixels.roll((-shift, -shift), (0, 1)).unflatten(1, (-1, window))
    windows = rolled.unflatten(0, (-1, window)).transpose(1, 2).flatten(0, 1)
    dense, patterns = mask.dense(pixels), order.patterns(pixels)
    assert [one.windows.start for one in patterns] == [
        sum(len(earlier.windows) for earlier in patterns[:index]) for index in range(len(patterns))
    ]
    for one in patterns:
        for place in one.windows:
            (original,) = [
                index for index, each in enumerate(windows) if torch.equal(each, there[place])
            ]
            added = dense[original] if one.mask is None else one.mask[0, 0]
            assert torch.equal(added, dense[original])
            assert one.mask is not None or not dense[original].any()


@pytest.mark.parametrize("family", ["SwinIR", "DRCT"])
def test_blocks_put_pixels_in_the_order_of_windows(family):
    fast = network(family)
    found = replace_modules(fast)
    assert found[f"{family} SwinTransformerBlock"] == found[f"{family} WindowAttention"] > 0


@pytest.mark.parametrize("family", ["SwinIR", "DRCT"])
@pytest.mark.parametrize("windows", [1, 3, 1 << 20])
def test_any_number_of_windows_at_a_time_gives_the_same_values(family, windows, monkeypatch):
    plain = network(family)
    fast = copy.deepcopy(plain)
    replace_modules(fast)
    sizes = []
    monkeypatch.setattr(swin_blocks, "windows_per_chunk", lambda x, total: min(windows, total))
    attend = OptimizedWindowAttention.attend
    monkeypatch.setattr(
        OptimizedWindowAttention,
        "attend",
        lambda self, x, *more: sizes.append(len(x)) or attend(self, x, *more),
    )
    image = torch.rand(1, 3, 40, 56)
    with torch.inference_mode():
        torch.testing.assert_close(fast(image), plain(image), rtol=0, atol=2e-6)
    # All parts of 5·7 windows are of one size.
    assert set(sizes) == {min(windows, 35)}


@pytest.mark.parametrize(
    ("family", "kind"), [("SwinIR", OptimizedSwinBlock), ("DRCT", OptimizedDenseGroup)]
)
def test_parts_overwrite_only_what_nothing_else_needs(family, kind):
    fast = network(family)
    replace_modules(fast)
    blocks = [part for part in fast.modules() if isinstance(part, kind)]
    kept = []

    def watch(block, given, result):
        kept.append(result.data_ptr() != given[0].data_ptr())

    for block in blocks:
        block.register_forward_hook(watch)
    with torch.inference_mode():
        fast(torch.rand(1, 3, 16, 24))
    # Each of SwinIR's two groups adds its result to what it was given; the first of DRCT's two
    # is given what the body's result is added to.
    assert kept == [True, False] * (len(blocks) // 2)
    kept.clear()
    fast(torch.rand(1, 3, 16, 24))  # a gradient may be asked for what it was given
    assert len(kept) == len(blocks)
    assert all(kept)


@pytest.mark.grid(5)
@pytest.mark.parametrize("total", [1, 7, 64, 97, 100, 768])
@pytest.mark.parametrize("fitting", [1, 12, 22, 5000])
def test_parts_are_equal_and_little_is_run_twice(total, fitting, monkeypatch):
    monkeypatch.setattr(
        swin_blocks, "_CHUNK_BYTES", fitting * swin_blocks._WORKSPACE_CHANNELS * 4 * 16 * 4
    )
    some = swin_blocks.windows_per_chunk(torch.empty(1, total * 4, 16), total)
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
        swin_blocks.scatter_rows(found, places, rows)
    expected[places] = rows
    assert torch.equal(found, expected)


@pytest.mark.parametrize("first", [0, 2, 4])
@pytest.mark.parametrize("channels", [3, 8])
def test_rows_are_put_into_some_of_the_channels(first, channels):
    places, rows = torch.randperm(50)[:20], torch.randn(20, channels)
    found, expected = torch.zeros(2, 50, 12)
    with torch.inference_mode():
        swin_blocks.scatter_rows(found[:, first : first + channels], places, rows)
    expected[places, first : first + channels] = rows
    assert torch.equal(found, expected)


def test_a_group_of_another_order_is_left_as_it_was(monkeypatch):
    monkeypatch.setattr(dense_group, "_RESIDUAL_SCALE", 0.3)
    plain = network("DRCT")
    fast = copy.deepcopy(plain)
    found = replace_modules(fast)
    assert found["DRCT RDG"] == 0 < found["DRCT SwinTransformerBlock"]
    image = torch.rand(1, 3, 24, 16)
    with torch.inference_mode():
        torch.testing.assert_close(fast(image), plain(image), rtol=0, atol=2e-6)


def test_a_group_holds_what_was_added_once():
    net = network("DRCT")
    replace_modules(net)
    group, dim = net.layers[1], net.layers[1].plain.swin5.plain.dim
    x = torch.randn(1, 512 * 512, net.embed_dim)
    with torch.inference_mode():
        group(x, (512, 512))
        taken = live_peak_bytes(lambda: group(x, (512, 512)))
    # In addition to the map: what some windows hold, and the pixels' order. The result replaces x.
    assert taken < 1.6 * 512 * 512 * dim * 4


def test_less_memory_is_held_than_queries_keys_and_values():
    net = network("DRCT")
    replace_modules(net)
    block = max(
        (part for part in net.modules() if isinstance(part, OptimizedSwinBlock)),
        key=lambda part: part.plain.dim,
    )
    channels = block.plain.dim
    x = torch.randn(1, 512 * 512, channels)
    with torch.inference_mode():
        block(x, (512, 512))  # finds the order of windows
        taken = live_peak_bytes(lambda: block(x, (512, 512)))
    # The result, what some windows hold, and the pixels' order; all of them were more than 6.
    assert taken < 2.5 * x.numel() * 4
