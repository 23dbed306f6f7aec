"""Triton's halo kernels: interpreted against the definition, and compiled for named GPUs.

The interpreter runs the same programs on the CPU; where there is a GPU they run on it.
"""

import itertools
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lowtide import UsageError
from lowtide.attention.halo.autograd import (
    halo_attention,
    is_preferred,
    missing_requirement,
    unsupported_reason,
)
from lowtide.attention.halo.launch import (
    SHARED_MEMORY,
    KernelTile,
    KernelTiles,
    choose_tiles,
    key_tiles,
    padded_dim,
    unmasked_keys,
    unmasked_windows,
)
from lowtide.attention.spatial import LocalWindowAttention, WindowGeometry
from lowtide.attention.spatial.position import PositionEncoding, RelativePositionBias
from lowtide.attention.spatial.window_grid import windows_along
from lowtide.attention.spec import LocalDevice
from support.spatial_reference import local_attention

pytest.importorskip("triton")
SCRIPT = Path(__file__).parents[2] / "scripts" / "compile_halo_kernels.py"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def drawn(seed):
    """Windows, tensors of odd sizes, and a table or none."""
    draw = random.Random(seed)
    size = draw.choice([8, 12, 16])
    shared = draw.choice([0, 2, 4, 8 if size == 16 else 4])
    step = size - shared
    windows = WindowGeometry(
        size,
        shared,
        "halo",
        ("mask", "shift", "zero", "reflect")[seed % 4],
        (draw.randrange(step), draw.randrange(step)),
    )
    heads, dim = draw.choice([1, 2]), draw.choice([4, 16, 24])
    torch.manual_seed(seed)
    shape = draw.randint(1, 2), draw.randint(1, 27), draw.randint(1, 27), heads, dim
    # The boundaries that have no backward pass have none here either.
    learns = windows.boundary != "reflect"
    # Slices of one tensor, as a projection gives them: strides that are no one's own.
    whole = torch.randn(*shape[:-1], 3 * dim, device=DEVICE).requires_grad_(learns)
    table = None
    if seed // 4 % 2:
        side = 2 * windows.max_distance + 1
        table = torch.randn(heads, side, side, device=DEVICE)
        table.requires_grad_(learns and windows.boundary != "shift")
    return windows, whole, table, learns


def reference(windows, whole, table):
    position = PositionEncoding()
    if table is not None:
        position = RelativePositionBias(len(table), windows.max_distance)
        del position.table
        position.table = table
    tensors = whole.chunk(3, -1)
    return local_attention(*tensors, windows, position, tensors[0].shape[-1] ** -0.5)


def check_parity(seed, dtype=torch.float32, tolerance=2e-6, tiles=None):
    windows, whole, table, learns = drawn(seed)
    found = halo_attention(*whole.to(dtype).chunk(3, -1), windows, table, tiles=tiles)
    exact_table = None if table is None else table.double().cpu()
    exact = reference(windows, whole.double().cpu(), exact_table)
    assert found.dtype == dtype
    results = [(found.detach().cpu(), exact.detach())]
    if learns:
        weights = torch.randn(exact.shape)
        learning = [t for t in (whole, table) if t is not None and t.requires_grad]
        found = torch.autograd.grad(found, learning, weights.to(found))
        exact = torch.autograd.grad(exact, learning, weights.double())
        results += zip(found, exact, strict=True)
    for one, other in results:
        assert (one - other).abs().max() <= 2 * tolerance * max(1, float(other.abs().max()))


@pytest.mark.grid(5)
@pytest.mark.parametrize("seed", range(8))
def test_equals_its_definition(seed):
    check_parity(seed)


@pytest.mark.grid(4)
@pytest.mark.parametrize("seed", [1, 2, 3, 5, 7, 8, 12, 16, 17])
def test_equals_its_definition_where_tiles_are_loaded_as_such(seed):
    """As Hopper's copy engine does."""
    tile = KernelTile(64, 64, tiled=True)
    check_parity(seed, tiles=KernelTiles(tile, tile, tile, tile))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8, 72))
def test_equals_its_definition_at_drawn_sizes(seed):
    check_parity(seed)


def test_half_precision():
    check_parity(4, torch.float16, 3e-3)


def test_bf16_is_refused_where_triton_interprets_it_wrongly(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "no bf16" in unsupported_reason((1, 9, 9, 1, 16), torch.bfloat16, WindowGeometry())
    monkeypatch.delenv("TRITON_INTERPRET")
    assert unsupported_reason((1, 9, 9, 1, 16), torch.bfloat16, WindowGeometry()) is None


@pytest.mark.grid(2)
@pytest.mark.parametrize("tile", [KernelTile(64, 16), KernelTile(16, 64)], ids=str)
def test_tiles_that_do_not_divide_the_window(tile):
    torch.manual_seed(0)
    windows = WindowGeometry(16, 6, phase=(3, 7))  # steps of 10
    table = torch.randn(
        1, 2 * windows.max_distance + 1, 2 * windows.max_distance + 1, device=DEVICE
    )
    leaves = torch.randn(1, 13, 11, 1, 24, device=DEVICE).requires_grad_(), table.requires_grad_()
    weights = torch.randn(1, 13, 11, 1, 8, device=DEVICE)
    results = []
    for tiles in (KernelTiles(tile, tile, tile, tile), None):
        found = halo_attention(*leaves[0].chunk(3, -1), windows, leaves[1], tiles=tiles)
        results.append((found, *torch.autograd.grad(found, leaves, weights)))
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, atol=1e-4)


def test_gradients_are_the_same_every_time():
    windows, whole, table, _ = drawn(4)
    results = [
        torch.autograd.grad(halo_attention(*whole.chunk(3, -1), windows, table).sum(), whole)[0]
        for _ in range(2)
    ]
    assert torch.equal(*results)


@pytest.mark.grid(5)
@pytest.mark.parametrize("boundary", ["mask", "shift", "zero", "reflect"])
@pytest.mark.parametrize("position", ["none", "table", "decomposed", "rope"])
def test_the_module_gives_the_same_by_either_way(boundary, position):
    torch.manual_seed(0)
    module = LocalWindowAttention(
        8, heads=2, window=8, shared=4, boundary=boundary, position=position, phase=(1, 2)
    ).to(DEVICE)
    image = torch.randn(1, 8, 11, 14, device=DEVICE)
    with torch.no_grad():
        usual = module(image)
        module.kernel = "triton"
        if boundary == "reflect" and position == "rope":
            with pytest.raises(UsageError, match="rotated by the position where it is seen"):
                module(image)
            return
        assert (module(image) - usual).abs().max() < 2e-6


def test_unsupported_calls_are_refused_by_name():
    usual, shape = WindowGeometry(), (1, 99, 99, 2, 32)
    assert (
        unsupported_reason(shape, torch.float32, usual, needs_grad=True, learned_bias=True) is None
    )
    for windows, dtype, options, said in (
        (WindowGeometry(form="blended"), torch.float32, {}, "blended"),
        (usual, torch.float64, {}, "the dtype is float64"),
        (
            WindowGeometry(boundary="reflect"),
            torch.float32,
            dict(needs_grad=True),
            "reflected keys",
        ),
        (
            WindowGeometry(boundary="shift"),
            torch.float32,
            dict(needs_grad=True, learned_bias=True),
            "not supported with boundary='shift'",
        ),
    ):
        assert said in unsupported_reason(shape, dtype, windows, **options)
    assert "256 channels" in unsupported_reason((1, 9, 9, 1, 256), torch.float32, usual)
    assert "exceed 65535" in unsupported_reason((70_000, 9, 9, 1, 32), torch.float32, usual)
    with pytest.raises(UsageError, match="blended"):
        LocalWindowAttention(8, form="blended", kernel="triton")(torch.zeros(1, 8, 9, 9).to(DEVICE))


def test_says_what_it_needs(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert missing_requirement(LocalDevice("cuda", (8, 0))) is None
    assert "7.5" in missing_requirement(LocalDevice("cuda", (7, 0))).reason
    assert "CUDA" in missing_requirement(LocalDevice()).reason
    module, image = LocalWindowAttention(8), torch.zeros(1, 8, 9, 9)
    assert "needs a CUDA device" in module.explain(image)
    module.kernel = "triton"
    with pytest.raises(UsageError, match="needs a CUDA device"):
        module(image)


def test_taken_unasked_only_where_it_was_measured():
    gpu, types = LocalDevice("cuda", (9, 0)), (torch.bfloat16, torch.float16, torch.float32)
    assert [is_preferred(gpu, dtype) for dtype in types] == [True, True, False]
    for other in (LocalDevice("cuda", (8, 9)), LocalDevice("cuda", (10, 0)), LocalDevice()):
        assert not is_preferred(other, torch.bfloat16)


@pytest.mark.grid(5)
@pytest.mark.parametrize("seed", range(40))
def test_unmasked_windows_and_tiles_are_inside_the_image(seed):
    """Window by window, and for tiles of keys also tile by tile."""
    draw = random.Random(seed)
    size = draw.choice([8, 16, 32])
    shared = draw.choice([0, 4, 8] if size > 8 else [0, 4])
    boundary = draw.choice(["mask", "shift", "zero", "reflect"])
    phase, length = draw.randrange(size - shared), draw.randint(1, 150)
    windows, tile = (
        WindowGeometry(size, shared, boundary=boundary, phase=(phase, 0)),
        KernelTile(64, 64),
    )
    found = windows_along(
        WindowGeometry(size, shared, boundary="zero", phase=(phase, 0)), length, phase
    )
    whole = [one.first_key >= 0 and one.first_key + one.keys <= length for one in found]
    if boundary == "shift":
        whole = [length >= size] * len(found)
    first, last = unmasked_windows(windows, length, phase, tile)
    assert whole == [first <= place < last for place in range(len(found))]

    first, last = unmasked_keys(windows, length, phase, tile)
    begin = (phase + windows.halo) % tile.side
    for number in range(key_tiles(windows, length, phase, tile)):
        keys = set(range(number * tile.side - begin, (number + 1) * tile.side - begin))
        seeing = [
            one for one in found if keys & set(range(one.first_key, one.first_key + one.keys))
        ]
        good = keys <= set(range(length)) and all(
            keys <= set(range(one.first_key, one.first_key + one.keys))
            and one.queries == windows.stride
            for one in seeing
        )
        if first <= number < last:
            assert good
        elif boundary != "shift" and windows.stride % 8 == windows.shared % 8 == 0:
            assert not good


def test_tiles_follow_the_shared_memory():
    kinds = itertools.product(
        SHARED_MEMORY.values(),
        (torch.float32, torch.bfloat16, torch.float16),
        (16, 32, 53, 64, 128),
    )
    for limit, dtype, dim in kinds:
        tiles = choose_tiles(WindowGeometry(), dim, dtype, limit)
        for tile in (tiles.forward, tiles.query, tiles.key, tiles.bias):
            assert min(tile.queries, tile.keys) >= 16
    small, large = (
        choose_tiles(WindowGeometry(), 128, torch.float32, SHARED_MEMORY[gpu])
        for gpu in ((8, 6), (9, 0))
    )
    assert small.forward.keys < large.forward.keys
    assert [padded_dim(dim) for dim in (1, 16, 17, 53, 64, 128)] == [16, 16, 32, 64, 64, 128]


def compiled(*arguments):
    """What the command prints, in a process of its own: this one may interpret."""
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_compiles_for_gpus_that_are_absent():
    found = compiled("--capability", "8.0", "9.0", "--kernel", "forward")
    assert {row["capability"] for row in found} == {"8.0", "9.0"}
    assert all(0 < row["shared_bytes"] <= row["limit_bytes"] for row in found)


@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["7.5", "8.0", "8.6", "9.0", "10.0", "12.0"])
def test_fits_the_shared_memory_of_every_gpu(gpu):
    """GPUs of other capabilities have the shared memory of one of these."""
    types = ["fp16" if gpu == "7.5" else "bf16", "fp32"]
    found = compiled("--capability", gpu, "--type", *types, "--head", "32", "64", "128")
    assert len(found) == 24
    for row in found:
        assert row["shared_bytes"] <= row["limit_bytes"], row


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("seed", range(40))
def test_equals_its_definition_on_a_gpu(seed):
    check_parity(seed)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_large_images_on_a_gpu(dtype):
    """Against the portable way in fp32, whose parity has tests of its own."""
    torch.manual_seed(0)
    module = LocalWindowAttention(64, kernel="portable").to(DEVICE)
    image = torch.randn(1, 64, 517, 803, device=DEVICE)
    with torch.no_grad():
        exact = module(image)
        plain = (module.to(dtype)(image.to(dtype)) - exact).abs().max()
        module.kernel = "triton"
        found = (module(image.to(dtype)) - exact).abs().max()
        module.kernel = "auto"
        assert ("triton" in module.explain(image.to(dtype)).splitlines()[0]) == is_preferred(
            LocalDevice.of(image.device), dtype
        )
    assert found <= 2 * plain + 1e-5
