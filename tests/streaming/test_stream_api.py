"""`lowtide.stream`: the same call within a budget, and what it refuses."""

import copy
import errno
import gc
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide import BudgetError, ModelError, OutputError, UsageError
from lowtide.core import scratch
from lowtide.core.units import MIB
from lowtide.memory.live_peak import live_peak_bytes
from lowtide.streaming.capture.model_inputs import ModelInputs
from lowtide.streaming.certificate import StreamCertificate, _measure
from lowtide.streaming.pages.page import MemoryPage, memory_order
from lowtide.streaming.pages.spilled_page import DiskPage
from support.stream_models import Normed, whole

pytestmark = pytest.mark.usefixtures("results_alone")


class Skipped(Normed):
    """With a map that is there from the beginning to the end."""

    def forward(self, image):
        x = early = self.blocks[0](self.first(image))
        for block in self.blocks[1:]:
            x = x + block(x)
        return F.pixel_shuffle(self.last(x * early), 2)


@pytest.mark.parametrize("pages", ["auto", "memory", "disk"])
def test_a_batch_of_any_size_equals_the_model(model, pages):
    image = torch.rand(2, 3, 75, 53)
    found = lowtide.stream(model, budget="64MiB", pages=pages)(image)
    assert (found - whole(model, image)).abs().max() <= 5e-6


def test_results_can_be_trained_on(model):
    weight = torch.ones((), requires_grad=True)
    found = lowtide.stream(model, budget="64MiB")(torch.rand(1, 3, 16, 16))
    with torch.enable_grad():
        (found * weight).sum().backward()
    assert weight.grad is not None


def test_results_do_not_depend_on_the_budget(model):
    image = torch.rand(1, 3, 200, 160)
    expected = whole(model, image)
    for budget in ("30MiB", "40MiB", "80MiB", "1GiB"):
        found = lowtide.stream(model, budget=budget)(image)
        assert (found - expected).abs().max() <= 5e-6


@pytest.mark.parametrize("pages", ["memory", "disk"])
def test_memory_stays_within_the_budget_and_below_the_whole(model, pages):
    image = torch.rand(1, 3, 512, 384)
    budget = 52 * MIB if pages == "memory" else 40 * MIB
    small = lowtide.stream(model, budget=budget, pages=pages)
    assert small.explain(image).startswith("streamed, segments: ")
    small(image)  # what libraries set up when they are first used

    taken = live_peak_bytes(lambda: small(image))
    assert taken <= budget
    assert taken <= live_peak_bytes(lambda: whole(model, image)) * 0.6


@pytest.mark.parametrize("budget", ["1GiB", "100MiB"])
def test_the_predicted_peak_is_the_measured_peak(model, budget):
    image = torch.rand(1, 3, 512, 384)
    small = lowtide.stream(model, budget=budget, pages="memory")
    prepared = small.prepare(image)
    small(image)
    taken = live_peak_bytes(lambda: small(image))
    assert 0.99 <= prepared.layout.peak_bytes / taken <= 1.02


def test_rows_come_from_the_top_down(model):
    image = torch.rand(1, 3, 96, 64)
    small = lowtide.stream(model, budget="30MiB", pages="disk")
    found = list(small.rows(image))
    assert [first for first, _ in found] == sorted({first for first, _ in found})
    assert (torch.cat([rows for _, rows in found], 2) - whole(model, image)).abs().max() <= 5e-6


def test_an_abandoned_run_leaves_only_reusable_buffers(model):
    small = lowtide.stream(model, budget="64MiB", pages="disk")
    before = open_files()
    for _ in range(2):
        rows = small.rows(torch.rand(1, 3, 96, 64))
        next(rows)
        rows.close()
        gc.collect()
    blocks = small._scratch.blocks()
    assert len(blocks._free_blocks) == blocks._count > 0
    assert open_files() <= before + 1


def open_files():
    folder = Path("/proc/self/fd")  # elsewhere there is nothing to count
    return len(list(folder.iterdir())) if folder.is_dir() else 0


@pytest.mark.grid(2)
@pytest.mark.parametrize("enlarged", [2, 8])
def test_a_budget_that_is_too_small_names_one_that_is_not(model, enlarged):
    side, budgets = 256, (17, 18)
    if enlarged == 8:  # the result is so large that more is left for the heap than the least
        model = nn.Sequential(nn.Conv2d(3, 192, 3, padding=1), nn.PixelShuffle(8)).eval()
        side, budgets = 512, (60, 200)
    image = torch.rand(1, 3, side, side)
    named = set()
    for budget in budgets:
        with pytest.raises(BudgetError) as caught:
            lowtide.stream(model, budget=f"{budget}MiB").explain(image)
        assert caught.value.hint
        named.add(caught.value.smallest)
    (smallest,) = named
    assert smallest
    assert lowtide.stream(model, budget=-(-smallest // MIB) * MIB).explain(image)


@pytest.mark.parametrize("budget", [56, 60])
def test_pages_stay_in_memory_as_far_as_they_fit(budget):
    model, image = Skipped().eval(), torch.rand(1, 3, 512, 384)
    small = lowtide.stream(model, budget=budget * MIB)
    layout = small.prepare(image).layout
    assert layout.placement == "disk" and layout.resident
    assert 0 < layout.spilled_peak_bytes < layout.pages_bytes
    assert " of them on disk" in small.explain(image)
    assert (small(image) - whole(model, image)).abs().max() <= 5e-6
    taken = live_peak_bytes(lambda: small(image))
    assert taken <= budget * MIB
    assert 0.99 <= layout.peak_bytes / taken <= 1.02


def test_a_certificate_is_remembered(model, monkeypatch):
    image = torch.rand(1, 3, 40, 40)
    lowtide.stream(model, budget="64MiB")(image)

    def never(*_):
        raise AssertionError("compared again")

    monkeypatch.setattr("lowtide.streaming.certificate._measure", never)
    lowtide.stream(model, budget="64MiB")(image)
    with torch.no_grad():
        model.first.bias += 0.5
    try:
        with pytest.raises(AssertionError, match="compared again"):
            lowtide.stream(model, budget="64MiB")(image)
    finally:
        with torch.no_grad():
            model.first.bias -= 0.5


def test_16_bits_that_leave_a_lot_are_judged_by_fp32(model):
    low, image = copy.deepcopy(model).bfloat16(), torch.rand(1, 3, 40, 40).bfloat16()
    inputs = ModelInputs.of(image)
    usual = _measure(low, inputs, allowed=1.0)
    assert usual.own_error is None
    assert usual.holds(1.0)
    strict = _measure(low, inputs, allowed=-1.0)  # whatever their difference
    exact = copy.deepcopy(model).bfloat16().float()
    with torch.no_grad():
        whole, found = exact(image.float()), low(image)
    own = (found - whole).abs().max() / whole.abs().max()
    assert strict.own_error == pytest.approx(float(own), rel=1e-3)
    assert strict.holds(-1.0)
    assert not StreamCertificate(2.1 * strict.own_error, "", strict.own_error).holds(1.0)
    # Numbers of 32 bits are held to what is allowed.
    assert _measure(model, ModelInputs.of(image.float()), allowed=-1.0).own_error is None


def test_bands_are_compared_without_tf32(model, monkeypatch):
    kinds = torch.backends.cuda.matmul, torch.backends.cudnn
    seen = []

    def noting(*arguments):
        seen.append([kind.allow_tf32 for kind in kinds])
        return _measure(*arguments)

    before = [kind.allow_tf32 for kind in kinds]
    monkeypatch.setattr("lowtide.streaming.certificate._measure", noting)
    lowtide.stream(model, budget="64MiB")(torch.rand(1, 3, 40, 40))
    assert seen == [[False, False]]
    assert [kind.allow_tf32 for kind in kinds] == before


class Either(nn.Module):
    """Two networks of one name and the same weights."""

    def __init__(self, wide):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.wide = nn.Conv2d(3, 3, 3, padding=1), wide

    def forward(self, image):
        result = self.conv(image)
        return self.conv(result) + result if self.wide else result


def test_a_certificate_is_of_what_a_module_does(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    # At 40 rows both are compared at the same size: neither proof is the other's.
    for wide in (False, True):
        module, image = Either(wide).eval(), torch.rand(1, 3, 40, 40)
        with torch.no_grad():
            expected = module(image)
        result = lowtide.stream(module, budget="64MiB")(image)
        torch.testing.assert_close(result, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "enlarged, side, compared",
    [
        (1, 40, 40),
        (1, 200, 72),
        (2, 128, 64),
        (8, 20, 12),
        (8, 66, 10),
    ],
)
def test_a_model_is_compared_on_a_small_image_of_the_same_rest(
    tmp_path, monkeypatch, enlarged, side, compared
):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    seen = []

    class Seen(nn.Sequential):
        def forward(self, image):
            seen.append(image.shape[2:])
            return super().forward(image)

    layer = nn.Conv2d(1, enlarged**2, 3, padding=1)
    module = Seen(layer, nn.PixelShuffle(enlarged)).eval()
    lowtide.stream(module, budget="1GiB")(torch.rand(1, 1, side, side + 1))
    # Captures see both sizes; the real one is seen by the first capture alone.
    small = compared, min(side + 1, compared + 1)
    assert set(seen) == {(side, side + 1), small}


def test_layouts_are_remembered(model, monkeypatch):
    image = torch.rand(1, 3, 96, 64)
    first = lowtide.stream(model, budget="64MiB").prepare(image).layout

    def never(*_, **__):
        raise AssertionError("looked at again")

    monkeypatch.setattr("lowtide.streaming.planner.layout_cost.estimate_segment", never)
    monkeypatch.setattr("lowtide.streaming.planner.dry_run.trace_stream_run", never)
    again = lowtide.stream(model, budget="64MiB").prepare(image).layout
    assert (again.key, again.peak_bytes) == (first.key, first.peak_bytes)
    with pytest.raises(AssertionError, match="looked at again"):
        lowtide.stream(model, budget="64MiB").prepare(torch.rand(1, 3, 96, 72))


def test_a_wrong_rule_is_found_out(monkeypatch):
    """A norm whose statistics are of something else must not pass."""
    from lowtide.streaming.rules import norm

    honest = norm.GroupMoments.merged

    def average(self, other):
        both = honest(self, other)
        mean = (self.squares / self.count + other.squares / other.count) / 2
        return norm.GroupMoments(both.count, both.mean, mean * both.count)

    monkeypatch.setattr(norm.GroupMoments, "merged", average)
    with pytest.raises(ModelError, match="differ from the whole"):
        lowtide.stream(Normed().eval(), budget="64MiB")(torch.rand(1, 3, 80, 80))


class Refused(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.call = call

    def forward(self, image):
        return self.call(self.conv(image))


REFUSED = {
    "random": (lambda x: x + torch.randn_like(x), "draws random numbers"),
    "dropout": (lambda x: F.dropout(x, 0.5, training=True), "no rule for|draws random"),
    "depends on data": (lambda x: x * 2 if x.sum() > 0 else x, "depends on the values"),
    "no image": (lambda x: x.mean((2, 3)), "no rows"),
    "mixed rows": (lambda x: x.flatten(1), r"no rule for (flatten|view|resh)"),
}


@pytest.mark.parametrize(
    "call", [lambda x: (x, x * 2), lambda x: x.permute(0, 3, 1, 2)], ids=["two", "rows elsewhere"]
)
def test_results_may_be_several_and_have_their_rows_elsewhere(call):
    module, image = Refused(call).eval(), torch.rand(1, 3, 80, 80)
    found, expected = lowtide.stream(module, budget="64MiB")(image), module(image)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_with_a_reason(name):
    call, reason = REFUSED[name]
    with pytest.raises(ModelError, match=reason):
        lowtide.stream(Refused(call).eval(), budget="64MiB")(torch.rand(1, 3, 80, 80))


@pytest.mark.parametrize(("least", "grid"), [(1, 128), (200, 1)])
def test_a_module_that_takes_no_small_image_is_compared_at_a_larger_one(least, grid):
    class Large(nn.Conv2d):
        def forward(self, image):
            if image.shape[2] < least or image.shape[2] % grid:
                raise ValueError(f"{image.shape[2]} rows are none of mine")
            return super().forward(image)

    module, image = Large(3, 3, 3, padding=1).eval(), torch.rand(1, 3, 640, 16)
    torch.testing.assert_close(lowtide.stream(module, budget="64MiB")(image), module(image))
    module, image = Large(3, 3, 3, padding=1).eval(), torch.rand(1, 3, 640, 16)
    least = 600
    with pytest.raises(ModelError, match=r"at a size below 16×640: .* rows are none of mine"):
        lowtide.stream(module, budget="64MiB")(image)


def test_refuses_what_is_no_image(model):
    small = lowtide.stream(model, budget="64MiB")
    with pytest.raises(UsageError, match="batch, channels"):
        small(torch.rand(3, 8, 8))
    with pytest.raises(ModelError, match="cannot be captured"):
        small(torch.zeros(1, 3, 8, 8, dtype=torch.uint8))
    with pytest.raises(UsageError, match="one image, not a batch of 2"):
        next(small.rows(torch.rand(2, 3, 8, 8)))
    with pytest.raises(UsageError, match="pages"):
        lowtide.stream(model, pages="tape")


def test_refuses_training():
    with pytest.raises(ModelError, match="training mode"):
        lowtide.stream(Normed().train(), budget="64MiB")(torch.rand(1, 3, 32, 32))


def test_a_disk_page_holds_rows_of_any_dimension():
    rows = torch.randn(2, 3, 10, 4).to(torch.bfloat16)
    page = DiskPage(rows.shape, rows.dtype, 2, rows.device, scratch.ScratchSpace())
    page.write(4, rows[:, :, 4:])
    page.write(0, rows[:, :, :4])
    expected = torch.cat([rows[:, :, 8:], rows[:, :, 1:6]], 2)
    assert torch.equal(page.read([(8, 10), (1, 6)]), expected)
    page.close()


@pytest.mark.parametrize(
    ("kind", "order"),
    [("memory", [0, 2, 3, 1]), ("memory", [0, 3, 2, 1]), ("disk", [0, 2, 3, 1])],
)
def test_pages_keep_the_order_in_memory(kind, order):
    """Channels-last maps come back channels last, of however few rows."""
    laid = torch.randn(1, 6, 10, 4).permute(order).contiguous()
    rows = laid.permute([order.index(place) for place in range(4)])
    page = MemoryPage(2, rows.device)
    if kind == "disk":
        page = DiskPage(rows.shape, rows.dtype, 2, rows.device, scratch.ScratchSpace())
    for first, last in ((0, 4), (4, 9), (9, 10)):
        page.write(first, rows[:, :, first:last])
    found = page.read([(1, 6), (8, 10)])
    assert torch.equal(found, torch.cat([rows[:, :, 1:6], rows[:, :, 8:]], 2))
    assert memory_order(found) == memory_order(rows)
    page.close()


class AtItsOwnSize(nn.Module):
    """As models of Swin's kind do something else at the size that they were trained at."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, image):
        return self.conv(image) if image.shape[2:] == (64, 64) else self.conv(image).relu()


def test_a_model_with_a_size_of_its_own_is_compared_at_another():
    model, image = AtItsOwnSize().eval(), torch.rand(1, 3, 320, 192)
    assert torch.equal(lowtide.stream(model, budget="64MiB")(image), whole(model, image))


def test_a_full_disk_is_an_error_that_says_so(model, monkeypatch):
    class Full:
        def __init__(self, file):
            self._file = file

        def __getattr__(self, name):
            return getattr(self._file, name)

        def write(self, data):
            raise OSError(errno.ENOSPC, "No space left on device")

    real = scratch.tempfile.TemporaryFile
    monkeypatch.setattr(scratch.tempfile, "TemporaryFile", lambda **kw: Full(real(**kw)))
    before = open_files()
    with pytest.raises(OutputError, match="disk is full"):
        lowtide.stream(model, budget="64MiB", pages="disk")(torch.rand(1, 3, 64, 64))
    gc.collect()
    assert open_files() <= before


def test_a_second_run_writes_over_the_pages_of_the_first(model):
    small, images = lowtide.stream(model, budget="64MiB", pages="disk"), torch.rand(3, 1, 3, 96, 64)
    before = open_files()
    small(images[0])
    file = small._scratch.blocks()._file._file
    size = file.seek(0, 2)
    for image in images[1:]:
        assert torch.equal(small(image), lowtide.stream(model, budget="64MiB")(image))
    assert open_files() <= before + 1
    assert small._scratch.blocks()._file._file is file
    assert file.seek(0, 2) == size > 0
    del small, file
    gc.collect()
    assert open_files() <= before


def test_a_folder_that_is_not_there(model, tmp_path):
    small = lowtide.stream(model, budget="64MiB", pages="disk", scratch=tmp_path / "none")
    with pytest.raises(OutputError, match="could not create a scratch file"):
        small(torch.rand(1, 3, 64, 64))
