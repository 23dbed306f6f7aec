"""Adversarial losses against their formulas, and penalties against discriminators on paper."""

import math

import pytest
import torch
from torch import nn

from lowtide import UsageError
from lowtide.training.losses.gan import discriminator_loss, generator_loss, gradient_penalty

KINDS = "vanilla", "lsgan", "hinge", "r3gan"
REAL, FAKE = (2.0, -0.5), (0.25, 1.5)


def logistic(value):
    return math.log1p(math.exp(value))


def mean(values):
    return sum(values) / len(values)


def test_generator_in_numbers():
    for kind, expected in (
        ("vanilla", mean([logistic(-fake) for fake in FAKE])),
        ("lsgan", mean([(fake - 1) ** 2 for fake in FAKE])),
        ("hinge", -mean(FAKE)),
        ("r3gan", mean([logistic(1.75), logistic(-2.0)])),
    ):
        loss = generator_loss(kind, torch.tensor(FAKE), torch.tensor(REAL))
        assert loss.item() == pytest.approx(expected, rel=1e-6)


def test_discriminator_in_numbers():
    for kind, expected in (
        ("vanilla", mean([logistic(-real) for real in REAL]) + mean([logistic(f) for f in FAKE])),
        ("lsgan", (1.0 + 1.5**2) / 2 + (0.25**2 + 1.5**2) / 2),
        ("hinge", (0 + 1.5) / 2 + (1.25 + 2.5) / 2),
        ("r3gan", mean([logistic(-1.75), logistic(2.0)])),
    ):
        loss = discriminator_loss(kind, torch.tensor(REAL), torch.tensor(FAKE))
        assert loss.item() == pytest.approx(expected, rel=1e-6)


def test_the_losses_push_in_opposite_directions():
    """Real logits are to rise and fake ones to fall; the generator wants fake ones to rise."""
    for kind in KINDS:
        real, fake = (torch.zeros(2, 1, 5, 7, requires_grad=True) for _ in range(2))
        for_real, for_fake = torch.autograd.grad(discriminator_loss(kind, real, fake), (real, fake))
        assert (for_real < 0).all()
        assert (for_fake > 0).all() or (kind == "lsgan" and not for_fake.any())
        (for_made,) = torch.autograd.grad(generator_loss(kind, fake, real), fake)
        assert (for_made < 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_finite_differences(kind):
    torch.manual_seed(0)
    real, fake = (torch.randn(2, 1, 3, 3).double().requires_grad_() for _ in range(2))
    check = torch.autograd.gradcheck
    assert check(lambda real, fake: discriminator_loss(kind, real, fake), (real, fake))
    assert check(lambda fake: generator_loss(kind, fake, real), (fake,))


def test_half_types_and_strong_logits_are_finite():
    for kind in KINDS:
        for strength in (1.0, 1e4):
            real = torch.tensor([-strength, strength], dtype=torch.bfloat16)
            fake = (-real).requires_grad_()
            with torch.autocast("cpu", torch.bfloat16):
                losses = discriminator_loss(kind, real, fake), generator_loss(kind, fake, real)
            for loss in losses:
                assert loss.dtype == torch.float32 and loss.isfinite()
                assert torch.autograd.grad(loss, fake)[0].isfinite().all()


def test_only_r3gan_looks_at_real_logits_for_the_generator():
    fake = torch.tensor(FAKE)
    for kind in KINDS[:3]:
        assert generator_loss(kind, fake) == generator_loss(kind, fake, torch.tensor(REAL))
    with pytest.raises(UsageError, match="needs the logits of real images"):
        generator_loss("r3gan", fake)


def test_the_generator_gives_real_logits_no_gradient():
    real, fake = (torch.zeros(4, requires_grad=True) for _ in range(2))
    generator_loss("r3gan", fake, real).backward()
    assert real.grad is None and fake.grad is not None


def test_r3gan_pairs_and_nothing_else():
    many, one = torch.zeros(4, 1), torch.zeros(4)
    for loss in (
        lambda: discriminator_loss("r3gan", many, one),
        lambda: generator_loss("r3gan", one, many),
    ):
        with pytest.raises(UsageError, match=r"not real \(4, 1\) and fake \(4,\)"):
            loss()


def test_unknown_kinds():
    for name, near in (("hing", "hinge"), ("r3", "r3gan"), ("VANILLA", "use")):
        for loss in (discriminator_loss, generator_loss):
            with pytest.raises(UsageError, match=f"unknown adversarial loss {name!r}") as caught:
                loss(name, torch.zeros(1), torch.zeros(1))
            assert near in (caught.value.hint or "")


# Penalties


def test_the_penalty_of_a_linear_discriminator_is_its_weight_squared():
    for batch in (1, 3):
        torch.manual_seed(0)
        linear = nn.Linear(3 * 5 * 4, 1)
        picture = torch.rand(batch, 3, 5, 4, requires_grad=True)
        penalty = gradient_penalty(linear(picture.flatten(1)), picture)
        assert penalty.item() == pytest.approx(linear.weight.square().sum().item(), rel=1e-5)
        (gradient,) = torch.autograd.grad(penalty, linear.weight)
        assert torch.allclose(gradient, 2 * linear.weight)


def test_the_penalty_is_a_mean_over_images():
    picture = torch.rand(3, 3, 4, 4, requires_grad=True)
    penalty = gradient_penalty(picture.square().sum((1, 2, 3)) / 2, picture)
    norms = picture.detach().square().sum((1, 2, 3))
    assert penalty.item() == pytest.approx(norms.mean().item(), rel=1e-5)


def test_the_logits_of_a_map_are_summed():
    picture = torch.rand(2, 3, 6, 5, requires_grad=True)
    logits = 2 * picture.sum(1, keepdim=True)
    assert gradient_penalty(logits, picture).item() == pytest.approx(4 * 3 * 6 * 5)
    of_means = gradient_penalty(logits.mean((1, 2, 3)), picture)
    assert of_means.item() == pytest.approx(4 * 3 / (6 * 5))


def test_the_penalty_can_be_differentiated():
    torch.manual_seed(0)
    first, second = (torch.randn(shape).double() for shape in ((4, 12), (1, 4)))
    picture = torch.rand(2, 3, 2, 2).double().requires_grad_()

    def penalty(first, second):
        return gradient_penalty(torch.tanh(picture.flatten(1) @ first.T) @ second.T, picture)

    weights = first.requires_grad_(), second.requires_grad_()
    assert torch.autograd.gradcheck(penalty, weights)


def test_the_penalty_under_autocast_and_of_flat_images():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.SiLU(), nn.Conv2d(8, 1, 3))
    picture = torch.full((2, 3, 9, 11), 0.5, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        penalty = gradient_penalty(network(picture), picture)
    penalty.backward()
    assert penalty.dtype == torch.float32 and penalty.isfinite() and penalty > 0
    first = network[0].weight.grad
    assert first is not None and first.isfinite().all() and first.any()


def test_penalties_of_what_is_not_connected():
    linear, picture = nn.Linear(12, 1), torch.rand(2, 12)
    with pytest.raises(UsageError, match=r"image \(2, 12\) does not require"):
        gradient_penalty(linear(picture), picture)
    picture.requires_grad_()
    for logits in (linear(picture.detach()), linear(picture).detach()):
        with pytest.raises(UsageError, match="do not depend on the image"):
            gradient_penalty(logits, picture)
