"""Other people's modules compute their attention here, and nothing else changes."""

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lowtide import UsageError
from lowtide.attention import use


class Asks(nn.Module):
    """Calls PyTorch's function with whatever it is given."""

    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, *tensors):
        return F.scaled_dot_product_attention(*tensors, **self.options)


class Block(nn.Module):
    """A part in a part, as models have them."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *tensors):
        return self.inner(*tensors) + 0


def rand(*shape):
    return torch.randn(*shape, dtype=torch.float64)


CASES = {
    "batch": ({}, (rand(2, 3, 9, 8), rand(2, 3, 7, 8), rand(2, 3, 7, 8))),
    "no batch": ({}, (rand(9, 8), rand(7, 8), rand(7, 8))),
    "three dimensions": ({}, (rand(5, 9, 8), rand(5, 7, 8), rand(5, 7, 8))),
    "five dimensions": ({}, (rand(2, 2, 3, 9, 8), rand(2, 2, 3, 7, 8), rand(2, 2, 3, 7, 8))),
    "shared keys": ({}, (rand(2, 3, 9, 8), rand(1, 3, 7, 8), rand(2, 1, 7, 8))),
    "mask": ({}, (rand(2, 3, 9, 8), rand(2, 3, 7, 8), rand(2, 3, 7, 8), rand(9, 7))),
    "mask of three": ({}, (rand(5, 9, 8), rand(5, 7, 8), rand(5, 7, 8), rand(5, 9, 7) > 0)),
    "causal": (dict(is_causal=True), (rand(2, 3, 9, 8), rand(2, 3, 9, 8), rand(2, 3, 9, 8))),
    "scale": (dict(scale=0.1), (rand(2, 3, 9, 8), rand(2, 3, 7, 8), rand(2, 3, 7, 8))),
    "grouped": (dict(enable_gqa=True), (rand(2, 4, 9, 8), rand(2, 2, 7, 8), rand(2, 2, 7, 8))),
    "value's width": ({}, (rand(2, 3, 9, 8), rand(2, 3, 7, 8), rand(2, 3, 7, 5))),
}


@pytest.mark.grid(3)
@pytest.mark.parametrize("backend", [None, "reference", "chunked", "sdpa-flash"])
@pytest.mark.parametrize("case", CASES)
def test_gives_what_pytorch_gives(case, backend):
    options, tensors = CASES[case]
    module = Asks(**options)
    usual = module(*tensors)
    with use(module, backend) as used:
        found = module(*tensors)
    assert found.shape == usual.shape
    assert (found - usual).nan_to_num().abs().max() < 1e-12
    assert sum(used.calls.values()) == 1


def test_is_taken_over_only_inside_and_until_removed():
    inside, outside = Block(Asks()), Asks()
    tensors = CASES["batch"][1]
    used = use(inside, "reference")
    inside(*tensors)
    outside(*tensors)
    assert used.calls == {"reference": 1}
    used.remove()
    inside(*tensors)
    assert used.calls == {"reference": 1}
    assert not inside._forward_pre_hooks
    assert not inside.inner._forward_hooks


def test_the_innermost_choice_holds():
    inner = Asks()
    outer = Block(inner)
    with use(outer, "chunked") as wide, use(inner, "sdpa-math") as narrow:
        outer(*CASES["batch"][1])
    assert narrow.calls == {"sdpa-math": 1}
    assert wide.calls == {}


def test_says_why_another_backend_ran():
    module = Asks(dropout_p=0.5)
    with use(module, "chunked") as used:
        module(*CASES["batch"][1])
    assert "not chunked: there is dropout" in used.report()


def test_strict_raises():
    module = Asks(dropout_p=0.5)
    with use(module, "chunked", policy="strict"), pytest.raises(UsageError, match="dropout"):
        module(*CASES["batch"][1])
    # The failed call took nothing with it.
    assert module(*CASES["batch"][1]).shape == (2, 3, 9, 8)
    with use(module, "sdpa-math") as used:
        module(*CASES["batch"][1])
    assert used.calls == {"sdpa-math": 1}


def test_says_that_nothing_was_seen():
    module = nn.Linear(3, 3)
    with use(module) as used:
        module(torch.zeros(1, 3))
    assert "no attention was intercepted" in used.report()


def test_unknown_backends_are_refused():
    with pytest.raises(UsageError, match="'fast' is not known"):
        use(Asks(), "fast")


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_torch_multi_head_attention(gradients, masked):
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x = torch.randn(2, 5, 8)
    options = dict(need_weights=False)
    if masked:
        options["key_padding_mask"] = torch.tensor([[False] * 4 + [True]] * 2)
    with torch.set_grad_enabled(gradients):
        usual = layer(x, x, x, **options)[0]
        with use(layer, "reference") as used:
            found = layer(x, x, x, **options)[0]
    assert used.calls == {"reference": 1}
    assert torch.allclose(found, usual, atol=1e-6)


def test_torch_encoder_layer():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    x = torch.randn(2, 5, 8)
    with torch.no_grad():
        usual = layer(x)
        with use(layer, "reference") as used:
            assert torch.allclose(layer(x), usual, atol=1e-6)
    assert used.calls == {"reference": 1}


def test_parts_that_are_recomputed_are_routed_too():
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(Block):
        def forward(self, *tensors):
            return checkpoint(self.inner, *tensors, use_reentrant=False)

    module = Checkpointed(Asks())
    tensors = [t.clone().requires_grad_() for t in CASES["batch"][1]]
    with use(module, "chunked") as used:
        module(*tensors).sum().backward()
    assert used.calls == {"chunked": 2}


def test_other_threads_are_left_alone():
    routed, other = Asks(), Asks()
    tensors = CASES["batch"][1]
    started, done = threading.Event(), threading.Event()

    class Waits(nn.Module):
        def forward(self, *inner):
            started.set()
            done.wait(20)
            return routed(*inner)

    waiting = Waits()
    with use(waiting, "reference") as used:
        thread = threading.Thread(target=waiting, args=tensors)
        thread.start()
        assert started.wait(20)
        other(*tensors)
        assert used.calls == {}
        done.set()
        thread.join()
    assert used.calls == {"reference": 1}


def test_a_copy_is_routed_by_itself():
    module = Asks()
    with use(module, "reference") as used:
        copy.deepcopy(module)(*CASES["batch"][1])
        assert used.calls == {}


def test_autocast_holds_as_for_pytorch():
    module = Asks()
    query, key, value = (torch.randn(2, 3, 9, 8) for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16), use(module, "reference"):
        assert module(query, key.bfloat16(), value).dtype == torch.bfloat16
