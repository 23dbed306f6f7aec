"""Modules that keep something somewhere, drawn at random: each call is right, or refused."""

import array
import collections
import contextvars
import itertools
import random
import threading
import types
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import lowtide
from lowtide import LowtideError

GLOBAL = {}
VARIABLE = contextvars.ContextVar("kept", default=None)
LOCAL = threading.local()
BY_MODULE = weakref.WeakKeyDictionary()


class Slotted:
    __slots__ = ("value",)


class Attribute:
    """A place in an attribute of the module; others put a container of their own there."""

    def __init__(self, module):
        self.make(module)

    def make(self, module):
        module.kept = None

    def get(self, module):
        return module.kept

    def put(self, module, value):
        module.kept = value


def place(make, get, put):
    """Return a class of places from three functions of a module."""
    rules = {"make": make, "get": get, "put": put}
    return type(
        "Place", (Attribute,), {name: lambda _, *a, f=f: f(*a) for name, f in rules.items()}
    )


def inside(container, key):
    def make(module):
        module.kept = container()

    def get(module):
        return module.kept[key] if len(module.kept) or key == "value" else None

    def put(module, value):
        if hasattr(module.kept, "append"):
            module.kept.clear()
            module.kept.append(value)
        else:
            module.kept[key] = value

    return place(make, get, put)


def of(make_holder):
    """A place in an attribute of an object that the module has."""

    def make(module):
        module.kept = make_holder()
        module.kept.value = None

    return place(
        make,
        lambda module: module.kept.value,
        lambda module, value: setattr(module.kept, "value", value),
    )


def closed_over():
    value = None

    def get(module):
        return value

    def put(module, new):
        nonlocal value
        value = new

    return place(lambda module: put(module, None), get, put)


def of_class(module):
    return type(module)


PLACES = {
    "attribute": Attribute,
    "list": inside(list, 0),
    "deque": inside(collections.deque, 0),
    "dict": inside(lambda: {"value": None}, "value"),
    "ordered dict": inside(lambda: collections.OrderedDict(value=None), "value"),
    "default dict": inside(lambda: collections.defaultdict(lambda: None), "value"),
    "object": of(types.SimpleNamespace),
    "slots": of(Slotted),
    "function": of(lambda: eval("lambda: None")),
    "inner module": of(nn.Identity),
    "global": place(
        lambda module: GLOBAL.clear(),
        lambda module: GLOBAL.get("value"),
        lambda module, value: GLOBAL.update(value=value),
    ),
    "context variable": place(
        lambda module: VARIABLE.set(None),
        lambda module: VARIABLE.get(),
        lambda module, value: VARIABLE.set(value),
    ),
    "thread": place(
        lambda module: LOCAL.__dict__.clear(),
        lambda module: getattr(LOCAL, "value", None),
        lambda module, value: setattr(LOCAL, "value", value),
    ),
    "weak dict": place(
        lambda module: BY_MODULE.clear(),
        lambda module: BY_MODULE.get(module),
        lambda module, value: BY_MODULE.__setitem__(module, value),
    ),
    "class": place(
        lambda module: setattr(type(module), "held", None),
        lambda module: type(module).held,
        lambda module, value: setattr(type(module), "held", value),
    ),
}


def counted(before, x):
    return (before or 0) + 1


def mean_of(before, x):
    return x.mean(3, keepdim=True)


def whole_of(before, x):
    return x * 0.5


def size_of(before, x):
    return tuple(x.shape)


def table_of(before, x):
    same = isinstance(before, torch.Tensor) and before.shape == x.shape[3:]
    return before if same else torch.linspace(0, 1, x.shape[3])


def array_of(before, x):
    return np.arange(x.shape[3], dtype=np.float32)


def numbers_of(before, x):
    return array.array("d", [x.shape[3], (before[1] if before else 0) + 1])


def iterator_of(before, x):
    return before or itertools.count()


WRITTEN = [
    *(counted, mean_of, whole_of, size_of, table_of, array_of, numbers_of, iterator_of),
]


def used(value, x, later):
    """Return what a value that was kept makes of ``x``; numbers count from a later call on."""
    if value is None:
        return x
    if isinstance(value, torch.Tensor):
        fits = value.dim() < 4 or value.shape[2] == x.shape[2]
        return x + value if fits and value.shape[-1] in (1, x.shape[3]) else x
    if isinstance(value, np.ndarray):
        return x + torch.from_numpy(value) if len(value) == x.shape[3] else x
    if isinstance(value, tuple):
        return x * (1.5 if value[3] == 20 else 1)
    count = (
        value if isinstance(value, int) else value[1] if hasattr(value, "append") else next(value)
    )
    return x * 2 if count > later else x


def make_net(draw):
    """Return a function that makes the same net each time, and a sentence of what it is."""
    name, written = draw.choice([*PLACES]), draw.choice(WRITTEN)
    reads, first, later = (
        draw.choice(["before", "after", "never"]),
        draw.random() < 0.3,
        draw.randrange(8),
    )
    depth, seed = draw.randrange(1, 4), draw.randrange(1 << 16)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(seed)
            self.convs = nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1) for _ in range(depth)))
            self.place = PLACES[name](self)

        def forward(self, image):
            x = self.convs(image)
            if first:
                self.place.put(self, None)
            before = self.place.get(self)
            self.place.put(self, written(before, x))
            value = {"before": before, "after": self.place.get(self), "never": None}[reads]
            return used(value, x, later)

    return Net, f"{written.__name__} in {name}, read {reads}, {first=}, {later=}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(300))
def test_right_or_refused(seed, tmp_path, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    draw = random.Random(seed)
    make, what = make_net(draw)
    images = [torch.rand(1, 3, 16, side) for side in draw.choice([(12, 12, 12), (12, 20, 12)])]
    with torch.no_grad():
        whole = make().eval()
        wanted = [whole(image) for image in images]
        streamed = make().eval()
        run = lowtide.stream(streamed, budget="64MiB")
        for image, one in zip(images, wanted, strict=True):
            try:
                found = run(image)
            except LowtideError:
                break
            assert (found - one).abs().max() <= 2e-5 * one.abs().max(), what
        own = streamed(images[0])
    assert not isinstance(own, FakeTensor), what
    kept = streamed.place.get(streamed)
    assert not isinstance(kept, FakeTensor), what
