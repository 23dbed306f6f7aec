"""Masks, labels and whole numbers are streamed; tensors and modules of other kinds are refused."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import lowtide
from lowtide import LowtideError, ModelError, UsageError

pytestmark = pytest.mark.usefixtures("results_alone")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("levels", torch.tensor([1.0, 3.0, 5.0]))

    def forward(self, image):
        return self.last(self.first(image).relu())


class Inpainted(Net):
    def forward(self, image, mask):
        grown = F.max_pool2d(mask.float(), 3, 1, 1) > 0
        return super().forward(torch.where(mask, 0.0, image)).masked_fill(grown, 0.5), ~grown


class Labels(Net):
    def __init__(self):
        super().__init__()
        self.classes = nn.Embedding(5, 3)

    def forward(self, labels):
        return super().forward(self.classes(labels[:, 0]).permute(0, 3, 1, 2))


class Bytes(Net):
    def forward(self, image):
        return (super().forward(image / 255) * 255).clamp(0, 255).to(torch.uint8)


class Counts(nn.Module):
    def forward(self, image):
        return F.pad(image, (0, 0, 1, 1)).unfold(2, 3, 1).amax(-1) * 2


IMAGE, MASK = torch.rand(2, 3, 75, 48), torch.rand(2, 1, 75, 48) > 0.5
BOTH = {"image": 2, "mask": 2}


@pytest.mark.parametrize("batch", [1, 2])
def test_a_boolean_mask_is_streamed_beside_its_image(batch):
    module = Inpainted().eval()
    small = lowtide.stream(module, budget="64MiB", axis=BOTH)
    for mask in (MASK, ~MASK):
        given = IMAGE[:batch], mask[:batch]
        torch.testing.assert_close(small(*given), module(*given))


WHOLE_NUMBERS = {
    "labels": (Labels, torch.randint(5, (1, 1, 75, 48))),
    "bytes": (Bytes, torch.randint(256, (1, 3, 75, 48), dtype=torch.uint8)),
    "batch of bytes": (Bytes, torch.randint(256, (2, 3, 75, 48), dtype=torch.uint8)),
    "counts": (Counts, torch.randint(9, (1, 3, 75, 48), dtype=torch.int32)),
}


@pytest.mark.parametrize("name", WHOLE_NUMBERS)
def test_whole_numbers_are_streamed(name):
    make, given = WHOLE_NUMBERS[name]
    module = make().eval()
    torch.testing.assert_close(
        lowtide.stream(module, budget="64MiB")(given), module(given), rtol=0, atol=1
    )


@pytest.mark.parametrize(
    "reduce",
    [
        lambda x: x.argmax(1),
        lambda x: x.argmin(1, keepdim=True),
        lambda x: x.max(1)[0],
        lambda x: x.min(1, keepdim=True)[1],
        lambda x: (x > 0).any(1),
        lambda x: x.logsumexp(3),
    ],
    ids=["argmax", "argmin", "max", "place of min", "any", "logsumexp"],
)
def test_classes_of_pixels_are_streamed(reduce):
    class Classes(Net):
        def forward(self, image):
            return reduce(super().forward(image))

    module, image = Classes().eval(), IMAGE[:1]
    torch.testing.assert_close(lowtide.stream(module, budget="64MiB")(image), module(image))


class Reads(Net):
    """Takes numbers out of tensors."""

    def __init__(self, read):
        super().__init__()
        self.read = read

    def forward(self, image):
        return self.read(self, super().forward(image))


READS = {
    "item": lambda net, x: x * net.scale.item(),
    "tolist": lambda net, x: x * net.levels.tolist()[1],
    "one of several": lambda net, x: x * net.levels[2].item(),
    "computed": lambda net, x: (x * (net.scale.item() * 2 + 1)).clamp(max=net.scale.exp().item()),
    "float": lambda net, x: x * float(net.scale),
    "comparison": lambda net, x: x * 3 if net.scale.item() > 1 else x,
}


@pytest.mark.parametrize("name", READS)
def test_numbers_of_weights_may_be_read(name):
    module, image = Reads(READS[name]).eval(), IMAGE[:1]
    small = lowtide.stream(module, budget="64MiB")
    torch.testing.assert_close(small(image), module(image))
    module.scale.fill_(0.5)
    module.levels.mul_(2)
    torch.testing.assert_close(small(image), module(image))


@pytest.mark.parametrize(
    "read",
    [lambda net, x: x * x.max().item(), lambda net, x: x[..., net.levels.argmax() :]],
    ids=["of the image", "as an index"],
)
def test_numbers_that_change_the_program_are_refused(read):
    with pytest.raises(ModelError, match="values of the image or of a weight") as refused:
        lowtide.stream(Reads(read).eval(), budget="64MiB")(IMAGE[:1])
    assert refused.value.hint == "run it whole"


def test_what_draws_nothing_is_not_taken_for_a_draw():
    class Drops(Net):
        def __init__(self):
            super().__init__()
            self.steps = nn.GRU(3, 3, num_layers=2, dropout=0.5, batch_first=True)

        def forward(self, image):
            x = F.rrelu(F.dropout(super().forward(image), 0.0, training=True), training=False)
            return x + self.steps(x.mean(3).transpose(1, 2))[0].transpose(1, 2)[..., None]

    module, image = Drops().eval(), IMAGE[:1]
    torch.testing.assert_close(lowtide.stream(module, budget="64MiB")(image), module(image))


def fake(image):
    with FakeTensorMode():
        return torch.empty(image.shape)


def with_meta_buffer():
    module = Net().eval()
    module.register_buffer("table", torch.empty(3, device="meta"))
    return module


class TwoHalves(torch.Tensor):
    """A tensor made of two others, as quantized and sharded ones are."""

    @staticmethod
    def __new__(cls, halves):
        shape = halves[0].shape[0] * 2, *halves[0].shape[1:]
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=halves[0].dtype)

    def __init__(self, halves):
        self.first, self.second = halves

    def __tensor_flatten__(self):
        return ["first", "second"], None

    @staticmethod
    def __tensor_unflatten__(parts, *_):
        return TwoHalves((parts["first"], parts["second"]))

    __torch_dispatch__ = None


def with_table_of_two_halves():
    module = Net().eval()
    module.register_buffer("table", TwoHalves(torch.rand(4, 3).split(2)))
    return module


def scripted():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and still in use
        return torch.jit.script(Net().eval())


REFUSED = {
    "no module": (lambda: lambda image: image, lambda image: image, "torch.nn.Module"),
    "TorchScript": (scripted, lambda image: image, "the model is a TorchScript module"),
    "TorchScript inside": (
        lambda: nn.Sequential(nn.Conv2d(3, 3, 1), scripted()).eval(),
        lambda image: image,
        "^1 is a TorchScript module",
    ),
    "no weights yet": (
        lambda: nn.Sequential(nn.LazyConv2d(3, 3)).eval(),
        lambda image: image,
        "has no weights yet",
    ),
    "meta weights": (lambda: Net().eval().to("meta"), lambda image: image, "^scale .* meta tensor"),
    "meta buffer": (with_meta_buffer, lambda image: image, "^table .* meta tensor"),
    "tensor subclass": (with_table_of_two_halves, lambda image: image, "^table .*TwoHalves"),
    "meta image": (lambda: Net().eval(), lambda image: image.to("meta"), "no meta tensor"),
    "fake image": (lambda: Net().eval(), fake, "no fake tensor"),
    "sparse image": (lambda: Net().eval(), torch.Tensor.to_sparse, "no sparse tensor"),
    "complex image": (lambda: Net().eval(), lambda image: image + 0j, "real tensors"),
    "bytes for floats": (lambda: Net().eval(), torch.Tensor.byte, "cannot be captured"),
    "channels": (lambda: Net().eval(), lambda image: image[:, :2], "cannot be captured"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_kinds_are_refused_by_name_with_a_hint(name):
    make, change, reason = REFUSED[name]
    with pytest.raises(LowtideError, match=reason) as refused:
        lowtide.stream(make(), budget="64MiB")(change(IMAGE[:1]))
    assert refused.value.hint


def test_a_module_that_gets_such_a_tensor_after_its_first_call_is_refused():
    module, image = Net().eval(), IMAGE[:1]
    small = lowtide.stream(module, budget="64MiB")
    small(image)
    module.first.register_buffer("table", with_table_of_two_halves().table)
    with pytest.raises(ModelError, match="TwoHalves"):
        small(image)


@pytest.mark.parametrize("wrong", [{"pages": "ram"}, {"budget": "2 bananas"}])
def test_wrong_options_are_refused_before_the_first_call(wrong):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        lowtide.stream(Net().eval(), **wrong)
