"""What changes between calls of a fitted autoencoder, and calls at once."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor

import lowtide
from lowtide import ModelError
from support.tiny_autoencoders import decoded, encoded, halved, latents, same, small_vae


def in_bands(vae):
    return lowtide.fit(vae, budget="64MiB", pages="memory")


def other_weights(vae):
    vae.load_state_dict(halved(small_vae(**ATTENDED)).state_dict(), assign=True)


def circular(vae):
    for layer in vae.modules():
        if isinstance(layer, torch.nn.Conv2d):
            layer.padding_mode = "circular"
            layer._reversed_padding_repeated_twice = [layer.padding[0]] * 4


def another_layer(vae):
    vae.decoder.conv_out = torch.nn.Sequential(vae.decoder.conv_out, torch.nn.Tanh()).eval()


def another_processor(vae):
    vae.set_attn_processor(AttnProcessor())


ATTENDED = {"mid_block_add_attention": True}
CHANGES = (other_weights, circular, another_layer, another_processor)


@pytest.mark.grid(2)
@pytest.mark.parametrize("pages", ["auto", "memory"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_after_the_first_call_counts(change, pages):
    vae, wanted = small_vae(**ATTENDED), small_vae(**ATTENDED)
    lowtide.fit(vae, budget="64MiB", pages=pages)
    decoded(vae), encoded(vae)
    change(vae)
    change(wanted)
    assert same(decoded(vae), decoded(wanted))
    assert same(encoded(vae), encoded(wanted))


def test_autocast_is_for_its_calls_alone():
    config = {"use_quant_conv": False, "use_post_quant_conv": False}
    vae, plain = in_bands(small_vae(**config)), small_vae(**config)
    for cast in (True, False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            for call in (decoded, encoded):
                result, wanted = call(vae), call(plain)
                assert result.dtype is wanted.dtype
                error = (result - wanted).abs().max()
                assert error <= (0.05 if cast else 1e-5) * wanted.abs().max()


def test_casts_in_place_count():
    vae, plain = in_bands(small_vae()), small_vae()
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        vae.to(dtype), plain.to(dtype)
        with torch.no_grad():
            result, wanted = (one.decode(latents().to(dtype)).sample for one in (vae, plain))
        assert result.dtype is dtype
        allowed = 1e-5 if dtype is torch.float32 else 0.05
        assert (result - wanted).abs().max() <= allowed * wanted.abs().max()


def test_overflow_in_half_names_what_helps():
    vae = small_vae()
    with torch.no_grad():
        for layer in (vae.decoder.conv_in, vae.decoder.conv_out):
            layer.weight.mul_(1e5)
    in_bands(vae.half())
    with torch.no_grad(), pytest.raises(ModelError, match="NaN or infinity") as caught:
        vae.decode(latents().half())
    assert "float32" in caught.value.hint and "force_upcast" in caught.value.hint
    assert decoded(vae.float()).isfinite().all()


def test_threads_share_a_fitted_autoencoder():
    vae = in_bands(small_vae())
    with ThreadPoolExecutor(3) as threads:
        results = list(threads.map(lambda _: decoded(vae), range(6)))
    assert all(same(result, decoded(small_vae())) for result in results)


@pytest.mark.parametrize("pages", ["auto", "memory"])
def test_threads_share_a_part_whose_sizes_change(pages):
    """While one thread plans a size, the others run theirs, as they are or in bands."""
    vae, plain = lowtide.fit(small_vae(), budget="64MiB", pages=pages), small_vae()
    sizes = [torch.randn(1, 4, 12 + place % 4, 10) for place in range(12)]

    def call(given):
        with torch.no_grad():
            return vae.decode(given).sample

    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(call, sizes))
    for given, result in zip(sizes, results, strict=True):
        with torch.no_grad():
            assert same(result, plain.decode(given).sample)
