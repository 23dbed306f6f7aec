"""What cannot be streamed is refused by the part's name, in plain words; containers come back."""

import dataclasses
import importlib
import threading
from collections import namedtuple

import pytest
import torch
from torch import nn

import lowtide
from lowtide import ModelError
from lowtide.models.spandrel_files import fold_convs
from lowtide.streaming.capture.export_graph import capture_graph

pytestmark = pytest.mark.usefixtures("results_alone")


class Call(nn.Module):
    """A function as a part."""

    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, x):
        return self.call(x)


class Net(nn.Module):
    """With a part that has a place."""

    def __init__(self, call, pack=lambda x: x):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)
        self.middle = nn.ModuleDict({"odd": Call(call)})
        self.pack = pack

    def forward(self, image):
        found = self.middle["odd"](self.first(image))
        return self.pack(self.last(found) if found.dim() == 4 else found)


def fails(x):
    raise RuntimeError("no luck today\n" * 100)


ODD = {
    "branch": (lambda x: x if x.mean() > 0 else -x, "depends on the values of the image"),
    "shape": (lambda x: x * x[x > 0].numel(), "depends on the values of the image"),
    "error": (fails, "no luck today"),
    "flat": (lambda x: x.flatten(1), "no rule for"),
    "random": (torch.rand_like, "draws random numbers"),
}


@pytest.mark.parametrize("name", ODD)
def test_the_part_that_cannot_be_streamed_is_named(name, capfd):
    call, reason = ODD[name]
    with pytest.raises(ModelError, match=reason) as caught:
        lowtide.stream(Net(call).eval(), budget="64MiB")(torch.rand(1, 3, 64, 48))
    message = caught.value.message
    assert "middle.odd" in message
    assert "\n" not in message and len(message) < 400
    assert "def forward" not in capfd.readouterr().err


def test_a_module_that_needs_more_than_an_image_gets_a_hint():
    class Denoiser(nn.Conv2d):
        def forward(self, image, timestep):
            return super().forward(image) * timestep

    with pytest.raises(ModelError, match="timestep") as caught:
        lowtide.stream(Denoiser(3, 3, 1).eval())(torch.rand(1, 3, 8, 8))
    assert caught.value.hint.startswith("pass what its forward takes")


def test_numbers_that_16_bits_do_not_hold_are_named_with_a_way_out():
    module = Net(lambda x: (x * 6e4) * 6e4).half().eval()
    with pytest.raises(ModelError, match="NaN or infinity") as caught:
        lowtide.stream(module)(torch.rand(1, 3, 16, 16).half())
    assert "fp32" in caught.value.hint and "force_upcast" in caught.value.hint


def test_weights_that_are_computed_anew_are_streamed_or_get_a_hint_that_helps():
    span = pytest.importorskip("spandrel.architectures.SPAN").SPAN
    net = span(num_in_ch=3, num_out_ch=3, feature_channels=8, upscale=2).eval()
    image = torch.rand(1, 3, 41, 36)
    wanted = net(image)
    for one in (net, fold_convs(net)):
        assert (lowtide.stream(one, budget="64MiB")(image) - wanted).abs().max() < 1e-4

    class Anew(nn.Conv2d):
        def forward(self, image):
            self.weight.data = self.weight * image.mean()
            return super().forward(image)

    with pytest.raises(ModelError, match="computes a weight anew in each call") as caught:
        lowtide.stream(Anew(3, 3, 3).eval(), budget="64MiB")(image)
    assert "fold_convs" in caught.value.hint


def test_experts_that_are_chosen_by_the_image_are_refused():
    home = importlib.import_module("spandrel.architectures.SeemoRe.__arch.seemore_arch")
    model = home.SeemoRe(scale=2, in_chans=3, num_experts=3, num_layers=1, embedding_dim=12)
    with pytest.raises(ModelError, match=r"body\.0\.local_block\.block\.moe_layer .*values"):
        lowtide.stream(model.eval())(torch.rand(1, 3, 24, 16))


@dataclasses.dataclass
class Output:
    sample: object
    kept: int = 3


Pair = namedtuple("Pair", "facts sample")
PACKED = {
    "tuple": lambda x: (x,),
    "list": lambda x: [None, x],
    "dictionary": lambda x: {"sample": x, "kept": 3},
    "dataclass": Output,
    "named tuple": lambda x: Pair("facts", x),
    "nested": lambda x: {"inside": (1, [x])},
    "by number": lambda x: (x, len(x)),
}


def flat(tree):
    if dataclasses.is_dataclass(tree):
        return [type(tree), *flat(vars(tree))]
    if isinstance(tree, dict):
        return [type(tree), *(one for item in tree.items() for one in flat(item))]
    if isinstance(tree, (tuple, list)):
        return [type(tree), *(one for item in tree for one in flat(item))]
    return [tree]


@pytest.mark.grid(3)
@pytest.mark.parametrize("name", PACKED)
def test_one_tensor_comes_back_in_its_container(name):
    module = Net(torch.relu, PACKED[name]).eval()
    small = lowtide.stream(module, budget="64MiB")
    for images in (torch.rand(1, 3, 16, 16), torch.rand(2, 3, 16, 16)):
        for one, other in zip(flat(small(images)), flat(module(images)), strict=True):
            if isinstance(one, torch.Tensor):
                assert (one - other).abs().max() <= 5e-6
            else:
                assert one == other


def test_a_result_of_diffusers_comes_back_as_one():
    vae = pytest.importorskip("diffusers.models.autoencoders.vae")
    module = Net(torch.relu, lambda x: vae.DecoderOutput(sample=x)).eval()
    image = torch.rand(1, 3, 16, 16)
    found = lowtide.stream(module, budget="64MiB")(image)
    assert type(found) is vae.DecoderOutput
    for one in (found.sample, found["sample"], found[0]):
        assert (one - module(image).sample).abs().max() <= 5e-6


def test_a_result_without_a_tensor_is_refused():
    with pytest.raises(ModelError, match="without a tensor") as caught:
        capture_graph(Net(torch.relu, str).eval(), torch.rand(1, 3, 16, 16))
    assert caught.value.hint.startswith("wrap it")


def test_the_image_itself_may_be_the_result():
    image = torch.rand(1, 3, 16, 16)
    found = lowtide.stream(nn.Identity().eval(), budget="64MiB")(image)
    assert torch.equal(found, image) and found.data_ptr() != image.data_ptr()


@pytest.mark.grid(3)
@pytest.mark.parametrize("shared", ["nothing", "module", "streamed"])
def test_first_calls_of_several_threads_work(shared):
    modules = [Net(torch.relu).eval() for _ in range(3)]
    if shared != "nothing":
        modules = modules[:1] * 3
    runs = [lowtide.stream(module, budget="64MiB") for module in modules]
    if shared == "streamed":
        runs = runs[:1] * 3
    images = [torch.rand(1, 3, 16, 16 + 8 * (number % 2)) for number in range(3)]
    expected = [module(image) for module, image in zip(modules, images, strict=True)]
    found = {}

    def run(number):
        with torch.no_grad():
            found[number] = runs[number](images[number])

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert all((found[number] - expected[number]).abs().max() <= 5e-6 for number in range(3))
