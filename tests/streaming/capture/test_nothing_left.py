"""Tracing leaves nothing in what the user's code keeps, whether it succeeds or is refused."""

import functools
import sys
import threading
from collections import deque
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import FunctionType, ModuleType, SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import lowtide
from lowtide import ModelError

pytestmark = pytest.mark.usefixtures("results_alone")


def table(height, width):
    return torch.linspace(0, 1, height)[:, None].expand(height, width).clone()


def look_up(tables, key):
    if key not in tables:
        tables[key] = table(*key)
    return tables[key]


GLOBAL: dict = {}
LAST = None
LOCAL = threading.local()
VARIABLE = ContextVar("VARIABLE", default=None)


def of_global_name(height, width):
    global LAST
    if LAST is None or LAST.shape != (height, width):
        LAST = table(height, width)
    return LAST


@functools.lru_cache
def cached(height, width):
    return table(height, width), None


def by_default(height, width, known={}):  # noqa: B006 - the mistake that is meant
    return look_up(known, (height, width))


def of_thread(height, width):
    if getattr(LOCAL, "table", None) is None or LOCAL.table.shape != (height, width):
        LOCAL.table = table(height, width)
    return LOCAL.table


def of_context(height, width):
    if VARIABLE.get() is None or VARIABLE.get().shape != (height, width):
        VARIABLE.set(table(height, width))
    return VARIABLE.get()


def of_itself(height, width):
    if getattr(of_itself, "table", None) is None or of_itself.table.shape != (height, width):
        of_itself.table = table(height, width)
    return of_itself.table


KEEPING = of_global_name, by_default, of_thread, of_context, of_itself


def in_closure():
    known, last = {}, None

    def get(height, width):
        nonlocal last
        last = look_up(known, (height, width))
        return last

    return get


@dataclass
class Kept:
    tables: dict = field(default_factory=dict)
    last: object = None


@dataclass(slots=True)
class Slotted:
    last: object = None


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = None


class Net(nn.Module):
    """Adds tables of its size, which it keeps wherever Python can."""

    by_class: ClassVar[dict] = {}
    last = None

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.part = nn.Conv2d(3, 3, 3, padding=1), Part()
        self.tables, self.pairs, self.list, self.deque = {}, {}, [], deque()
        self.nested, self.config, self.kept = {"more": {}}, SimpleNamespace(table=None), Kept()
        self.slotted, self.closed, self.table = Slotted(), in_closure(), None
        self.register_buffer("grid", torch.zeros(1, 1), persistent=False)

    def forward(self, image):
        result, size = self.conv(image), image.shape[2:]
        for number, place in enumerate(self.places(), 1):
            result = result + place(*size) / number
        return self.finish(result)

    def places(self):
        return [getattr(self, name) for name in vars(Net) if name.startswith("in_")]

    def finish(self, result):
        return result

    def in_dictionary(self, *size):
        return look_up(self.tables, size)

    def in_pairs(self, *size):
        if size not in self.pairs:
            self.pairs[size] = (table(*size), "table")
        return self.pairs[size][0]

    def in_nested(self, *size):
        return look_up(self.nested["more"], size)

    def in_list(self, *size):
        for known in self.list:
            if known.shape == size:
                return known
        self.list.append(table(*size))
        return self.list[-1]

    def in_deque(self, *size):
        if not self.deque or self.deque[-1].shape != size:
            self.deque.append(table(*size))
        return self.deque[-1]

    def in_config(self, *size):
        if self.config.table is None or self.config.table.shape != size:
            self.config.table = table(*size)
        return self.config.table

    def in_dataclass(self, *size):
        self.kept.last = look_up(self.kept.tables, size)
        return self.kept.last

    def in_slots(self, *size):
        if self.slotted.last is None or self.slotted.last.shape != size:
            self.slotted.last = table(*size)
        return self.slotted.last

    def in_attribute(self, *size):
        if self.table is None or self.table.shape != size:
            self.table = table(*size)
        return self.table

    def in_part(self, *size):
        if self.part.table is None or self.part.table.shape != size:
            self.part.table = table(*size)
        return self.part.table

    def in_buffer(self, *size):
        if self.grid.shape != size:
            self.register_buffer("grid", table(*size), persistent=False)
        return self.grid

    def in_class(self, *size):
        return look_up(type(self).by_class, size)

    def in_class_attribute(self, *size):
        if Net.last is None or Net.last.shape != size:
            Net.last = table(*size)
        return Net.last

    def in_closure(self, *size):
        return self.closed(*size)

    def in_global(self, *size):
        return look_up(GLOBAL, size)

    def in_functions(self, *size):
        return sum(keep(*size) for keep in KEEPING)

    def in_cache(self, *size):
        return cached(*size)[0]


class Refused(Net):
    """Has an operator without a rule."""

    def finish(self, result):
        return result.flatten(1)


class Failing(Net):
    """Raises an error of its own, after it kept its tables."""

    def finish(self, result):
        raise RuntimeError("no luck today")


SIZE = 21, 18


def kept_values():
    """Return everything that this file's functions and classes keep."""
    tables = GLOBAL, LAST, VARIABLE.get(), vars(LOCAL), Net.by_class, Net.last, vars(of_itself)
    return tree_leaves((*tables, by_default.__defaults__))


def require_real(module, image, expected):
    """What is kept is real, and the module makes what it did."""
    kept = [*kept_values(), *tree_leaves([vars(one) for one in module.modules()])]
    kept += [module.kept.last, *module.kept.tables.values(), module.config.table]
    kept += [module.slotted.last, *module.closed.__closure__]
    assert all(type(one) in (Tensor, nn.Parameter) for one in kept if isinstance(one, Tensor))
    again = module(image)
    assert type(again) is Tensor and torch.equal(again, expected)


def forget():
    """Empty what all modules share."""
    global LAST
    LAST = Net.last = None
    for table in (GLOBAL, Net.by_class, by_default.__defaults__[0], vars(LOCAL), vars(of_itself)):
        table.clear()
    cached.cache_clear()
    VARIABLE.set(None)


@pytest.fixture
def image():
    return torch.rand(1, 3, *SIZE)


@pytest.fixture
def expected(image):
    found = Net().eval()(image)
    forget()
    yield found
    forget()


def test_tables_by_size_are_streamed_and_stay_real(image, expected):
    module = Net().eval()
    small = lowtide.stream(module, budget="64MiB")
    assert (small(image) - expected).abs().max() <= 1e-5
    assert not [one for one in kept_values() if one is not None]
    require_real(module, image, expected)
    assert (small(image) - expected).abs().max() <= 1e-5  # now that they are made
    both = torch.cat([image, image.flip(3)])
    assert (small(both) - module(both)).abs().max() <= 1e-5


@pytest.mark.parametrize("kind", [Refused, Failing])
def test_a_refusal_leaves_the_module_as_it_was(kind, image, expected):
    module = kind().eval()
    with pytest.raises(ModelError):
        lowtide.stream(module, budget="64MiB")(image)
    module.finish = lambda result: result
    require_real(module, image, expected)


def test_an_estimate_leaves_the_module_as_it_was(image, expected):
    module = Net().eval()
    lowtide.estimate(module, lowtide.InferenceStep((image,)))
    require_real(module, image, expected)


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = Net(), Net()


def test_fitting_leaves_the_module_as_it_was(image, expected):
    module = Autoencoder().eval()
    lowtide.fit(module, budget="64MiB", pages="memory")
    assert not [one for one in kept_values() if one is not None]
    assert (module.decoder(image) - expected).abs().max() <= 1e-5
    lowtide.unfit(module)
    require_real(module.decoder, image, expected)


class Proxy:
    """Says that it is of another class, as those of wrapt, Django and TensorBoard do."""

    def __init__(self, kind):
        self.__dict__["kind"] = kind

    def __getattribute__(self, name):
        if name in ("__dict__", "kind"):
            return object.__getattribute__(self, name)
        if name == "__class__":
            return self.kind
        raise AttributeError(name)


@pytest.mark.parametrize(
    "kind",
    [
        type,
        dict,
        list,
        ModuleType,
        FunctionType,
        functools.partial,
        np.ndarray,
        np.random.Generator,
    ],
)
def test_an_object_that_says_it_is_of_another_class_is_held(kind, image, expected):
    module = Net().eval()
    module.flags = Proxy(kind)
    small = lowtide.stream(module, budget="64MiB")
    assert (small(image) - expected).abs().max() <= 1e-5
    require_real(module, image, expected)


HIDDEN = {}


class Hides(nn.Module):
    """Keeps a tensor where no name in its code leads."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, image):
        found = self.conv(image)
        sys.modules[__name__].__dict__["HID" + "DEN"]["last"] = (found,)
        return found


def test_what_cannot_be_put_back_is_refused_by_name():
    with pytest.raises(ModelError, match=f"Hides keeps a tensor of each call in {__name__}"):
        lowtide.stream(Hides().eval(), budget="64MiB")(torch.rand(1, 3, 16, 16))
    assert not HIDDEN
