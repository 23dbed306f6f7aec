"""Training and gradients of fitted autoencoders: refused, and as ever once they are unfitted."""

import pytest
import torch

import lowtide
from lowtide import UsageError
from support.tiny_autoencoders import decoded, latents, pictures, same, small_vae


def fitted(pages="auto", **changes):
    return lowtide.fit(small_vae(**changes), budget="64MiB", pages=pages)


def modes(module):
    return [inner.training for inner in module.modules()]


@pytest.mark.parametrize("pages", ["auto", "memory"])
@pytest.mark.parametrize("quantized", [True, False])
def test_gradients_to_weights_are_refused(quantized, pages):
    vae = fitted(pages, use_quant_conv=quantized, use_post_quant_conv=quantized)
    for call in (lambda: vae.encode(pictures()), lambda: vae.decode(latents())):
        with pytest.raises(UsageError, match="no backward pass") as caught:
            call()
        assert "torch.no_grad()" in caught.value.hint
        assert "lowtide.unfit" in caught.value.hint


def test_gradients_to_latents_are_refused():
    vae = fitted(use_post_quant_conv=False).requires_grad_(False)
    with pytest.raises(UsageError, match="the input requires"):
        vae.decode(latents().requires_grad_())


def test_weights_without_gradients_need_no_other_mode():
    vae = fitted().requires_grad_(False)
    assert same(vae.decode(latents()).sample, decoded(small_vae()))


def test_training_goes_on_once_it_is_unfitted():
    vae = lowtide.unfit(fitted()).train()
    vae(pictures()).sample.sum().backward()
    assert all(weight.grad is not None for weight in vae.parameters())


def test_training_mode_is_kept_and_refused():
    vae = lowtide.fit(small_vae().train(), budget="64MiB")
    assert all(modes(vae))
    with torch.no_grad(), pytest.raises(UsageError, match="in training mode") as caught:
        vae.encode(pictures())
    assert "module.eval()" in caught.value.hint
    assert same(decoded(vae.eval()), decoded(small_vae()))
    assert not any(modes(vae))
    vae.decoder.mid_block.train()
    with pytest.raises(UsageError, match="but mid_block is in training mode"):
        decoded(vae)
    lowtide.unfit(vae)
    assert vae.decoder.mid_block.training
    assert not vae.encoder.training
