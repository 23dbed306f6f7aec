"""What changes in a module after its first image is seen by the next."""

import copy
import pickle
from collections import OrderedDict, deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import lowtide
from lowtide import ModelError, UsageError
from lowtide.streaming.module_fingerprint import ModuleFingerprint
from support.stream_models import Windows

pytestmark = pytest.mark.usefixtures("results_alone")


class Net(nn.Module):
    """Convolutions, a norm, and whatever of a module can change."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)
        self.norm, self.rest = nn.BatchNorm2d(8).eval(), nn.Sequential(nn.SiLU(), nn.Dropout(0.5))
        self.register_buffer("shift", torch.rand(1, 8, 1, 1))
        self.place = torch.rand(1, 8, 1, 1)
        self.scale, self.sizes, self.how = 2, [1, 3], {"mode": "add"}
        self.settings = SimpleNamespace(power=1.0)

    def act(self, x):
        return x.relu()

    def forward(self, image):
        x = self.rest(self.norm(self.first(image))) * self.scale + self.shift
        x = x + self.act(x) ** self.settings.power * self.sizes[1]
        x = x + self.place if self.how["mode"] == "add" else x * self.place
        return self.last(x)


class Halved(nn.Module):
    """As LoRA puts a layer round another."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.down = layer, nn.Conv2d(8, 3, 1)

    def forward(self, x):
        return self.layer(x) + self.down(x)


def put(where, **values):
    for name, value in values.items():
        setattr(where, name, value)


CHANGES = {
    "weights in place": lambda m: m.first.weight.mul_(0.5),
    "weights as data": lambda m: put(m.first.weight, data=m.first.weight * 0.5),
    "weights assigned": lambda m: m.load_state_dict(
        {name: value * 0.5 for name, value in m.state_dict().items()}, assign=True
    ),
    "parameter": lambda m: put(m.last, weight=nn.Parameter(m.last.weight * 2)),
    "buffer": lambda m: put(m, shift=m.shift + 1),
    "plain tensor": lambda m: put(m, place=m.place + 1),
    "plain tensor in place": lambda m: m.place.add_(1),
    "part": lambda m: put(m, last=nn.Conv2d(8, 3, 5, padding=2)),
    "part around another": lambda m: put(m, last=Halved(m.last)),
    "part of a part": lambda m: m.rest.append(nn.Sigmoid()),
    "padding": lambda m: put(m.first, padding_mode="circular"),
    "number": lambda m: put(m, scale=3),
    "of another type": lambda m: put(m, scale=2.5),
    "item of a list": lambda m: m.sizes.__setitem__(1, 4),
    "item of a dictionary": lambda m: m.how.update(mode="mul"),
    "setting": lambda m: put(m.settings, power=2.0),
    "method": lambda m: put(m, act=torch.sigmoid),
    "forward": lambda m: put(m.rest, forward=lambda x: x * 2),
    "hook": lambda m: m.first.register_forward_hook(lambda part, given, made: made * 2),
    "hook before": lambda m: m.last.register_forward_pre_hook(lambda part, given: given[0] + 1),
}
REFUSED = {
    "dropout": lambda m: m.rest.train(),
    "norm": lambda m: m.norm.train(),
    "everything": lambda m: m.train(),
}


@pytest.mark.slow
def test_each_change_is_seen():
    module, image = Net().eval(), torch.rand(1, 3, 16, 12)
    # Uncertified it is sooner, and what is wrong gets here.
    small = lowtide.Streamed(module, budget="64MiB", certified=False)
    for name, change in CHANGES.items():
        before = small(image)
        change(module)
        expected, found = module(image), small(image)
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max(), name
        assert (found - before).abs().max() >= 1e-2, name


def test_another_type_is_seen():
    module, image = Net().eval(), torch.rand(1, 3, 16, 12)
    small = lowtide.stream(module, budget="64MiB")
    small(image)
    module.double()
    expected, found = module(image.double()), small(image.double())
    assert found.dtype == torch.float64
    assert (found - expected).abs().max() <= 1e-12


@pytest.mark.parametrize("name", REFUSED)
def test_a_change_that_cannot_be_streamed_is_refused(name):
    module, image = Net().eval(), torch.rand(1, 3, 16, 12)
    small = lowtide.stream(module, budget="64MiB")
    expected = small(image)
    REFUSED[name](module)
    with pytest.raises(ModelError, match=r"training|draws random"):
        small(image)
    module.eval()
    assert torch.equal(small(image), expected)


def test_a_class_that_is_patched_is_seen(monkeypatch):
    module, image = Net().eval(), torch.rand(1, 3, 16, 12)
    small = lowtide.stream(module, budget="64MiB")
    small(image)
    monkeypatch.setattr(Net, "act", lambda self, x: x.abs())
    assert (small(image) - module(image)).abs().max() <= 1e-5


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table.mul_(3),
        lambda table: table.data.mul_(3),
        lambda table: put(table, data=table.data * 3),
    ],
)
def test_constants_of_weights_are_recomputed_when_they_change(change):
    """A table of biases is put together once, of places that are alike."""
    module, image = Biased().eval(), torch.rand(1, 3, 32, 24)
    small = lowtide.stream(module, budget="64MiB")
    small(image)
    change(module.table)
    assert (small(image) - module(image)).abs().max() <= 1e-5


class Biased(nn.Module):
    """A position's own number, of a table."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.table = nn.Conv2d(3, 3, 3, padding=1), nn.Parameter(torch.randn(3, 8))

    def forward(self, image):
        places = torch.arange(image.shape[2]) % 8
        return self.conv(image) + self.table[:, places][None, :, :, None]


class Remembers(nn.Module):
    """Keeps what it was given, as many do."""

    def __init__(self):
        super().__init__()
        self.conv, self.seen, self.size = nn.Conv2d(3, 3, 3, padding=1), None, (0, 0)

    def forward(self, image):
        self.seen, self.size = self.conv(image), image.shape[2:]
        return self.seen.relu()


def test_attributes_set_by_the_module_itself_are_no_change():
    module = Remembers().eval()
    small = lowtide.stream(module, budget="64MiB")
    images = [torch.rand(1, 3, 16, side) for side in (12, 20)]
    first = [small.prepare(image) for image in images]
    assert module.seen is None or type(module.seen) is torch.Tensor
    for image in images:
        module(image)
    assert all(small.prepare(image) is known for image, known in zip(images, first, strict=True))
    for image in images:
        assert (small(image) - module(image)).abs().max() <= 1e-5


def test_long_lists_and_nan_are_compared_too():
    module = nn.Conv2d(3, 3, 1)
    module.odd, module.many = float("nan"), list(range(5000))
    before = ModuleFingerprint(module)
    assert before.matches(ModuleFingerprint(module))
    module.many.append(1)
    assert not before.matches(ModuleFingerprint(module))


class Slotted:
    __slots__ = ("power",)


class Plain(nn.Conv2d):
    """With whatever Python code may decide by."""

    steps = [1, 2]  # noqa: RUF012 - as it is often written

    def __init__(self):
        super().__init__(3, 3, 1)
        self.many, self.table = [0.5] * 5000, np.zeros(4000)
        self.pairs, self.last = deque([1, 2]), torch.tensor(2.0)
        self.settings = SimpleNamespace(inner=SimpleNamespace(power=1), slotted=Slotted())
        self.settings.slotted.power = 1

    def act(self, x):
        return x.relu()

    @staticmethod
    def scale(x):
        return x


DEEP = {
    "item of a long list": lambda m: m.many.__setitem__(4000, 1.5),
    "type of an item": lambda m: m.many.__setitem__(4000, np.float64(0.5)),
    "array in place": lambda m: m.table.__setitem__(3000, 1),
    "queue": lambda m: m.pairs.append(3),
    "number in a tensor": lambda m: m.last.fill_(3),
    "number in its data": lambda m: m.last.data.fill_(4),
    "object in an object": lambda m: put(m.settings.inner, power=2),
    "slot": lambda m: put(m.settings.slotted, power=2),
    "list of a class": lambda m: Plain.steps.append(3),
    "code of a method": lambda m: put(Plain.act, __code__=(lambda self, x: x.abs()).__code__),
    "code of a function": lambda m: put(Plain.scale, __code__=(lambda x: 2 * x).__code__),
    "hook of all modules": lambda m: nn.modules.module.register_module_forward_hook(print),
}


def test_all_that_code_can_decide_by_is_compared(monkeypatch):
    monkeypatch.setattr(nn.modules.module, "_global_forward_hooks", OrderedDict())
    module = Plain()
    for name, change in DEEP.items():
        before = ModuleFingerprint(module)
        assert before.matches(ModuleFingerprint(module)), name
        change(module)
        assert not before.matches(ModuleFingerprint(module)), name


@pytest.mark.parametrize("before", [True, False])
def test_hooks_of_all_modules_are_called_for_those_of_the_model(before):
    module, image = Net().eval(), torch.rand(1, 3, 16, 12)
    small = lowtide.stream(module, budget="64MiB")
    expected, home = module(image), nn.modules.module
    if not before:
        small(image)
    handles = [
        home.register_module_forward_hook(lambda part, given, made: made * 1.5),
        home.register_module_forward_pre_hook(lambda part, given: (given[0] + 0.1,)),
    ]
    try:
        hooked = module(image)
        assert (small(image) - hooked).abs().max() <= 1e-5 * hooked.abs().max()
        small.register_forward_hook(print)
        with pytest.raises(UsageError, match="hooks of its own"):
            small(image)
        small._forward_hooks.clear()
    finally:
        for handle in handles:
            handle.remove()
    assert (small(image) - expected).abs().max() <= 1e-5


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")
def test_tangents_are_refused():
    module, image = Net().eval(), torch.rand(1, 3, 16, 12)
    small = lowtide.stream(module, budget="64MiB")
    with forward_ad.dual_level():
        with pytest.raises(UsageError, match="has a tangent"):
            small(forward_ad.make_dual(image, torch.rand_like(image)))
        expected = module(image)
        assert (small(image) - expected).abs().max() <= 1e-5
        module.place = forward_ad.make_dual(module.place, torch.rand_like(module.place))
        with pytest.raises(UsageError, match="has a tangent"):
            small(image)


def test_a_module_that_holds_its_own_streamed_run_is_not_changed_by_it():
    module, image = Net().eval(), torch.rand(1, 3, 16, 12)
    small = lowtide.Streamed(module, budget="64MiB", certified=False)
    module.__dict__["small"] = small
    known = small.prepare(image)
    small.prepare(torch.rand(1, 3, 16, 20))
    assert small.prepare(image) is known


@pytest.mark.parametrize("again", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_computes_with_its_own_weights(again):
    small, image = lowtide.stream(Windows().eval(), budget="64MiB"), torch.rand(1, 3, 32, 24)
    before = small(image)
    other = again(small)
    for weight in other.parameters():
        weight.mul_(0.5)
    assert (other(image) - other.module(image)).abs().max() <= 1e-5
    assert torch.equal(small(image), before)


def test_gradients_are_refused_before_anything_is_computed():
    module, image = Net().eval(), torch.rand(1, 3, 16, 12)
    small = lowtide.stream(module, budget="64MiB")
    with torch.enable_grad():
        with pytest.raises(UsageError, match=r"no backward pass, and first\.weight") as caught:
            small(image)
        assert "torch.no_grad()" in caught.value.hint and "lowtide.unfit" in caught.value.hint
        with pytest.raises(UsageError, match="no backward pass"):
            next(small.rows(image))
        module.requires_grad_(False)
        with pytest.raises(UsageError, match="no backward pass, and the input"):
            small(image.clone().requires_grad_())
        assert not small._prepared
        assert not small(image).requires_grad


@pytest.mark.grid(2)
@pytest.mark.parametrize("first", [True, False])
def test_autocast_is_part_of_what_a_program_is_kept_by(first):
    module, image = Windows().eval(), torch.rand(1, 3, 32, 24)
    small = lowtide.stream(module, budget="64MiB")
    for enabled in (first, not first, first):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            expected, found = module(image), small(image)
        assert found.dtype == expected.dtype
        allowed = 4e-2 if enabled else 2e-6
        assert (found - expected).abs().max() <= allowed * expected.abs().max()


def test_memory_order_is_part_of_it_too():
    module, image = Windows().eval(), torch.rand(1, 3, 32, 24)
    small = lowtide.stream(module, budget="64MiB")
    for order in (torch.contiguous_format, torch.channels_last, torch.contiguous_format):
        laid = image.contiguous(memory_format=order)
        assert (small(laid) - module(laid)).abs().max() <= 1e-5
