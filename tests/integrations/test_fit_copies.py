"""Copies of fitted autoencoders, and what is left of fitted ones."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch

import lowtide
from support.tiny_autoencoders import decoded, encoded, halved, latents, same, small_vae


def fitted():
    vae = lowtide.fit(small_vae(), budget="64MiB", pages="memory")
    decoded(vae)
    return vae


def test_a_copy_computes_with_its_own_weights():
    vae = fitted()
    other = halved(vae)
    assert same(decoded(other), decoded(halved(small_vae())))
    assert same(encoded(other), encoded(halved(small_vae())))
    assert same(decoded(vae), decoded(small_vae()))
    lowtide.unfit(other)
    assert torch.equal(decoded(other), decoded(halved(small_vae())))
    assert same(decoded(vae), decoded(small_vae()))


def test_a_shallow_copy_outlives_the_first():
    vae = fitted()
    part = copy.copy(vae.decoder)
    wanted = decoded(small_vae())
    with torch.no_grad():
        sample = vae.post_quant_conv(latents())
        lowtide.unfit(vae)
        assert same(part(sample), wanted)


def test_a_replica_computes_with_its_own_weights():
    vae = fitted()
    assert same(decoded(replica(vae)), decoded(halved(small_vae())))
    assert same(decoded(vae), decoded(small_vae()))


def replica(network):
    """What `torch.nn.DataParallel` makes for another GPU, with half the weights."""
    modules = list(network.modules())
    copies = {module: module._replicate_for_data_parallel() for module in modules}
    for module, own in copies.items():
        for name, child in module.named_children():
            setattr(own, name, copies[child])
        for name, weight in module.named_parameters(recurse=False):
            setattr(own, name, weight.detach() * 0.5)
    return copies[network]


@pytest.mark.parametrize("whole", [True, False])
def test_a_fitted_autoencoder_can_be_saved_whole(whole):
    vae = fitted()
    stored = io.BytesIO()
    if whole:
        torch.save(vae, stored)
        stored.seek(0)
        again = torch.load(stored, weights_only=False)
    else:
        again = pickle.loads(pickle.dumps(vae))
    assert same(decoded(again), decoded(small_vae()))
    lowtide.unfit(again)
    assert torch.equal(decoded(again), decoded(small_vae()))


def test_weights_are_saved_as_ever(tmp_path):
    from diffusers import AutoencoderKL

    vae = fitted()
    vae.save_pretrained(tmp_path)
    again = AutoencoderKL.from_pretrained(tmp_path)
    assert torch.equal(decoded(again), decoded(small_vae()))
    assert repr(vae) == repr(small_vae())
    assert type(vae.decoder).__name__ == "Decoder"
    assert list(vae.state_dict()) == list(small_vae().state_dict())


def test_a_fitted_autoencoder_is_freed_with_its_last_reference():
    vae = fitted()
    gone = weakref.ref(vae.decoder)
    gc.collect()
    gc.disable()
    try:
        del vae
        assert gone() is None
    finally:
        gc.enable()
