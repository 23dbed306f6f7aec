"""Models of diffusers and transformers with Lowtide's attention, against their own."""

import pytest
import torch

from lowtide.attention import use

diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def unet():
    torch.manual_seed(0)
    return diffusers.UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(32, 64),
        layers_per_block=1,
        cross_attention_dim=32,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        attention_head_dim=8,
    ).eval()


def denoise(unet):
    torch.manual_seed(1)
    with torch.no_grad():
        return unet(torch.randn(1, 4, 16, 16), 3, torch.randn(1, 7, 32)).sample


def test_a_unet_in_use(unet):
    usual = denoise(unet)
    with use(unet, "reference") as used:
        assert torch.allclose(denoise(unet), usual, atol=1e-5)
    assert used.calls == {"reference": len(unet.attn_processors)}


def test_a_vae_in_use():
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKL(
        block_out_channels=(32, 64),
        norm_num_groups=8,
        latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    ).eval()
    latent = torch.randn(1, 4, 9, 11)
    with torch.no_grad():
        usual = vae.decode(latent).sample
        with use(vae, "chunked") as used:
            assert torch.allclose(vae.decode(latent).sample, usual, atol=1e-5)
    # `decode` is not `forward`: the parts are routed, not the whole.
    assert used.calls == {"chunked": 1}


def tiny(kind):
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4)
    if kind == "bert":
        config = transformers.BertConfig(**sizes, vocab_size=50)
        return transformers.BertModel(config).eval()
    config = transformers.LlamaConfig(**sizes, vocab_size=50, num_key_value_heads=2)
    return transformers.LlamaModel(config).eval()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_language_models(kind, masked):
    model = tiny(kind)
    words = torch.arange(14).view(2, 7)
    mask = torch.ones(2, 7, dtype=torch.long)
    if masked:
        mask[1, 5:] = 0
    with torch.no_grad():
        usual = model(words, attention_mask=mask).last_hidden_state
        with use(model, "reference") as used:
            found = model(words, attention_mask=mask).last_hidden_state
    assert used.calls == {"reference": 2}
    seen = mask.bool()
    assert torch.allclose(found[seen], usual[seen], atol=1e-5)
