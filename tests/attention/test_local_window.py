"""Local windows against their definition, at odd sizes, with every rule at the border."""

import itertools
import random

import pytest
import torch

from lowtide import UsageError
from lowtide.attention import cpu_ops
from lowtide.attention.backends import BACKENDS
from lowtide.attention.spatial import LocalWindowAttention, WindowGeometry
from lowtide.attention.spatial import image_layout as image_module
from lowtide.attention.spatial.window_grid import blend_shares, windows_along
from lowtide.attention.spec import LocalDevice
from support.spatial_reference import local_attention

BOUNDARIES = "mask", "shift", "zero", "reflect"
POSITIONS = "none", "table", "decomposed", "rope"


def drawn(seed, side=70):
    """A module with windows that may be of any kind, and an image of any size up to ``side``."""
    draw = random.Random(seed)
    form, size = draw.choice(["halo", "blended"]), draw.choice([2, 3, 4, 7, 8, 16, 32])
    shares = range(0, size, 2) if form == "halo" else range(size // 2 + 1)
    shared = draw.choice(list(shares))
    torch.manual_seed(seed)
    # Small windows of large images take the reference seconds.
    most = side if size >= 7 else min(side, 23)
    module = LocalWindowAttention(
        8,
        heads=draw.choice([1, 2]),
        window=size,
        shared=shared,
        form=form,
        boundary=BOUNDARIES[seed % 4],
        position=POSITIONS[seed // 4 % 4],
        phase=(draw.randrange(size - shared), draw.randrange(size - shared)),
    )
    return module, torch.randn(2, 8, draw.randint(1, most), draw.randint(1, most))


def reference(module, image):
    projected = module._project(image)
    scale = projected[0].shape[-1] ** -0.5
    found = local_attention(*projected, module.windows, module.position, scale)
    return module.out(found.flatten(3)).permute(0, 3, 1, 2)


def gradients(run, module, image):
    image = image.detach().requires_grad_()
    result = run(image)
    weights = torch.linspace(-1, 1, result.numel(), dtype=result.dtype).view(result.shape)
    learning = [image, *module.parameters()]
    return result, *torch.autograd.grad(result, learning, weights, materialize_grads=True)


def check_parity(seed, dtype, tolerance, side=70):
    module, image = drawn(seed, side)
    exact = gradients(lambda x: reference(module, x), module.double(), image.double())
    module.to(dtype)
    found = gradients(module, module, image.to(dtype))
    for one, other in zip(found, exact, strict=True):
        largest = max(1, float(other.detach().abs().max()))
        assert (one - other).detach().abs().max() <= tolerance * largest, module
    with torch.no_grad():  # another way of putting windows together
        largest = max(1, float(exact[0].abs().max()))
        assert (module(image.to(dtype)) - exact[0]).abs().max() <= tolerance * largest


@pytest.mark.grid(5)
@pytest.mark.parametrize("seed", range(32))
def test_equals_its_definition(seed):
    check_parity(seed, torch.float64, 1e-11, side=40)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(32, 340))
def test_equals_its_definition_at_drawn_sizes(seed):
    check_parity(seed, (torch.float64, torch.float32)[seed % 2], (1e-11, 2e-5)[seed % 2])


@pytest.mark.slow
@pytest.mark.parametrize("height", range(1, 71))
def test_equals_its_definition_at_every_size(height):
    torch.manual_seed(0)
    kinds = list(itertools.product(["halo", "blended"], BOUNDARIES))
    with torch.no_grad():
        for width in range(1, 71):
            form, boundary = kinds[(height + width) % len(kinds)]
            module = LocalWindowAttention(4, window=16, shared=4, form=form, boundary=boundary)
            image = torch.randn(1, 4, height, width, dtype=torch.float64)
            assert (module.double()(image) - reference(module, image)).abs().max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["halo", "blended"])
def test_low_precision_is_no_worse_than_plain_operators(dtype, form):
    torch.manual_seed(0)
    module = LocalWindowAttention(32, heads=2, window=8, shared=4, form=form, position="table")
    image = torch.randn(1, 32, 29, 43)
    with torch.no_grad():
        exact = reference(module.double(), image.double())
        module.to(dtype)
        plain = reference(module, image.to(dtype))
        found = module(image.to(dtype))
    assert (found - exact).abs().max() <= 2 * (plain - exact).abs().max()


@pytest.mark.parametrize(
    "backend",
    [name for name, one in BACKENDS.items() if one.missing_requirement(LocalDevice()) is None],
)
def test_every_backend_gives_the_same(backend):
    module, image = drawn(5)
    module, image = module.double(), image.double()
    with torch.no_grad():
        usual = module(image)
        module.backend = backend
        assert (module(image) - usual).abs().max() < 1e-12


@pytest.mark.parametrize("form", ["halo", "blended"])
@pytest.mark.parametrize("position", POSITIONS)
def test_the_fused_kernel_takes_every_window(form, position):
    # Asked for by name, it would be refused with a bias whose keys do not lie side by side.
    module = LocalWindowAttention(16, form=form, position=position, backend="sdpa-flash")
    with torch.inference_mode():
        assert module(torch.randn(1, 16, 70, 50)).isfinite().all()


@pytest.mark.grid(5)
@pytest.mark.parametrize("seed", range(24))
def test_rows_equal_those_of_the_whole(seed):
    module, image = drawn(seed)
    height = image.shape[2]
    draw = random.Random(seed)
    with torch.no_grad():
        whole = module(image)
        for _ in range(4):
            first = draw.randrange(height)
            last = draw.randint(first + 1, height)
            low, high = module.rows_needed(first, last, *image.shape[2:])
            part = module.forward_rows(image[:, :, low:high], first, last, height)
            assert torch.equal(part, whole[:, :, first:last])


def test_rows_that_are_not_named_are_not_read():
    module = LocalWindowAttention(8, window=8, shared=4)
    assert module.rows_needed(8, 12, 40, 9) == (6, 14)
    with pytest.raises(UsageError, match="depend on rows 6 to 14"):
        module.forward_rows(torch.zeros(1, 8, 4, 9), 8, 12, 40)


@pytest.mark.parametrize("form", ["halo", "blended"])
def test_keeps_the_memory_format(form):
    module = LocalWindowAttention(8, window=8, shared=4, form=form)
    image = torch.randn(1, 8, 9, 11).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        assert module(image).is_contiguous(memory_format=torch.channels_last)
        assert module(image.contiguous()).is_contiguous()
        assert torch.allclose(module(image), module(image.contiguous()), atol=1e-6)


def check_coverage(windows, phase, length):
    """Every window computes pixels it sees, and shares at each pixel are positive and sum to 1."""
    found = windows_along(windows, length, phase)
    sums = [0.0] * length
    for one, shares in zip(found, blend_shares(windows, found, length), strict=True):
        assert one.first_key <= one.first_query
        assert one.first_query + one.queries <= one.first_key + one.keys
        for pixel, share in enumerate(shares, one.first_query):
            assert share > 0
            sums[pixel] += share
    assert all(abs(one - 1) < 1e-12 for one in sums)


@pytest.mark.grid(5)
@pytest.mark.parametrize("form", ["halo", "blended"])
@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_every_pixel_of_every_size_is_computed(form, boundary):
    for length in range(1, 2049):
        check_coverage(WindowGeometry(32, 8, form, boundary), 0, length)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["halo", "blended"])
@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_every_pixel_is_computed_with_every_phase(form, boundary):
    for size, shared in ((16, 0), (12, 4), (32, 16)):
        for phase in range(size - shared):
            for length in range(1, 200):
                check_coverage(WindowGeometry(size, shared, form, boundary), phase, length)


@pytest.mark.grid(9)
@pytest.mark.parametrize("seed", range(100))
def test_the_result_depends_on_the_image_at_every_pixel(seed):
    draw = random.Random(seed)
    module = LocalWindowAttention(
        4, boundary=draw.choice(BOUNDARIES), form=("halo", "blended")[seed % 2]
    )
    sizes = (33, 40, 64, 256) if seed < 4 else (draw.randint(33, 200),)
    image = torch.rand(1, 4, sizes[seed % len(sizes)], draw.randint(33, 120))
    with torch.no_grad():
        changed = module(image) - module(image * 0.5 + torch.rand_like(image) * 0.1)
    assert changed.abs().amax(1).min() > 1e-6


def test_pixels_that_are_not_finite_reach_only_those_that_see_them():
    module = LocalWindowAttention(8, window=8, shared=4)
    image = torch.randn(1, 8, 20, 20)
    image[0, 3, 9, 9] = torch.nan
    with torch.no_grad():
        bad = ~module(image).isfinite().all(1)[0]
    seen = torch.zeros(20, 20, dtype=torch.bool)
    seen[4:12, 4:12] = True  # blocks of rows and columns 4 to 7 and 8 to 11 see pixel 9
    assert torch.equal(bad, seen)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (dict(shared=7), "odd"),
        (dict(shared=32), "cannot overlap by 32"),
        (dict(form="blended", shared=17), "cannot overlap by 17"),
        (dict(form="stripes"), "not one of halo, blended"),
        (dict(boundary="wrap"), "not one of mask, shift, zero, reflect"),
        (dict(phase=(0, 24)), "not within a stride of 24"),
        (dict(heads=3), "cannot be divided into 3 heads"),
        (dict(position="sine"), "'sine' is not known"),
        (dict(heads=32), "multiple of 4, not 2"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, said):
    with pytest.raises(UsageError, match=said):
        LocalWindowAttention(64, **options)


@pytest.mark.parametrize(
    ("image", "said"),
    [
        (torch.zeros(1, 9, 9, 8), "needs 8 channels, not 1×9×9×8"),
        (torch.zeros(8, 9, 9), "needs 8 channels"),
        (torch.zeros(1, 8, 9, 9, dtype=torch.uint8), "floating-point"),
        (torch.zeros(1, 8, 0, 9), "no pixels"),
    ],
)
def test_images_that_do_not_fit_are_refused(image, said):
    with pytest.raises(UsageError, match=said):
        LocalWindowAttention(8)(image)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("known", [True, False])
def test_projections_by_onednn_or_by_pytorch(monkeypatch, bias, known):
    taken = []

    def observed(x, weight):
        taken.append(known and cpu_ops.uses_onednn(x, weight))
        return taken[-1]

    monkeypatch.setattr(image_module, "uses_onednn", observed)
    torch.manual_seed(0)
    module = LocalWindowAttention(16, heads=2, bias=bias).eval()
    image = torch.randn(1, 16, 41, 37)
    low, high = module.rows_needed(5, 31, 41, 37)
    with torch.no_grad():
        whole = module(image)
        some = module.forward_rows(image[:, :, low:high], 5, 31, 41)
        exact = module.double()(image.double())
    assert set(taken) == {known and cpu_ops.has_onednn, False}  # fp64 is PyTorch's own
    assert (whole - exact).abs().max() < 2e-6
    assert torch.equal(some, whole[:, :, 5:31])
