"""Which autoencoders `fit` takes, and what it says of the others, before anything is changed."""

import diffusers
import pytest
import torch
from torch import nn

import lowtide
from lowtide import UsageError
from support.tiny_autoencoders import DC, KL, TINY, built, same, small_vae

FOUR = {"block_out_channels": (8,) * 4, "layers_per_block": 1, "norm_num_groups": 4}
BLOCKS = {
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
}
TAKEN = {
    "AutoencoderKL": KL,
    "AutoencoderTiny": TINY,
    "AutoencoderDC": DC,
    "AutoencoderKLFlux2": KL,
    "AutoencoderKLHunyuanImage": {
        "in_channels": 3,
        "out_channels": 3,
        "latent_channels": 4,
        "block_out_channels": (32, 32),
        "layers_per_block": 1,
        "spatial_compression_ratio": 2,
        "sample_size": 32,
    },
    "VQModel": {**KL, "num_vq_embeddings": 16},
}

REFUSED = {
    "AutoencoderKLCosmos": (
        {
            "encoder_block_out_channels": (8,) * 4,
            "decode_block_out_channels": (8,) * 4,
            "num_layers": 1,
            "attention_resolutions": (8,),
            "resolution": 64,
        },
        "attention is among all frames",
    ),
    "AutoencoderKLHunyuanVideo": (FOUR, "attention is among all frames"),
    "AutoencoderKLAllegro": (FOUR, "only in overlapping tiles"),
    "AutoencoderKLLTXVideo": (
        {
            "block_out_channels": (8,) * 4,
            "decoder_block_out_channels": (8,) * 4,
            "layers_per_block": (1,) * 5,
            "decoder_layers_per_block": (1,) * 5,
            "latent_channels": 8,
        },
        "keep no frames between calls",
    ),
    "AutoencoderKLMochi": (
        {
            "encoder_block_out_channels": (32,) * 4,
            "decoder_block_out_channels": (32,) * 4,
            "layers_per_block": (1,) * 5,
            "latent_channels": 4,
        },
        "no module is made yet",
    ),
    "AutoencoderOobleck": (
        {
            "encoder_hidden_size": 8,
            "downsampling_ratios": [2, 2],
            "decoder_channels": 8,
            "decoder_input_channels": 4,
            "channel_multiples": [1, 2],
        },
        "has no two-dimensional convolution",
    ),
}

# Their encoder can be fitted alone.
HALF = {
    "VQModel": (
        {**KL, "block_out_channels": (32, 32), "norm_num_groups": 32, "norm_type": "spatial"},
        "decoder of this VQModel could not be run on a single image",
    ),
    "AsymmetricAutoencoderKL": (
        {
            **BLOCKS,
            "down_block_out_channels": (8, 16),
            "up_block_out_channels": (8, 16),
            "norm_num_groups": 4,
        },
        r"has a condition_encoder, which .* inputs other than one image \(image, mask",
    ),
    "AutoencoderKLTemporalDecoder": (
        {"block_out_channels": (32, 32), "down_block_types": ("DownEncoderBlock2D",) * 2},
        "takes sample, image_only_indicator",
    ),
    "ConsistencyDecoderVAE": (
        {
            "encoder_block_out_channels": (8, 8),
            "encoder_down_block_types": ("DownEncoderBlock2D",) * 2,
            "encoder_norm_num_groups": 4,
            "decoder_block_out_channels": (8, 8),
            "decoder_down_block_types": ("ResnetDownsampleBlock2D",) * 2,
            "decoder_up_block_types": ("ResnetUpsampleBlock2D",) * 2,
            "decoder_norm_num_groups": 4,
            "decoder_layers_per_block": 1,
            "decoder_num_train_timesteps": 10,
        },
        "computes with decoder_unet too",
    ),
}


def autoencoder(name, config):
    found = getattr(diffusers, name, None)
    if found is None:
        pytest.skip(f"diffusers {diffusers.__version__} has no {name}")
    return built(found, **config)


def refused(module, match, **changes):
    """Refused, with nothing changed; the hint."""
    before = state(module)
    with pytest.raises(UsageError, match=match) as caught:
        lowtide.fit(module, **changes)
    assert state(module) == before
    return caught.value.hint


def state(module):
    """What fitting a module could change of it and of those inside."""
    return [
        (name, type(inner), sorted(vars(inner)), list(inner._forward_pre_hooks), inner.training)
        for name, inner in module.named_modules()
    ]


@pytest.mark.parametrize("name", TAKEN)
def test_autoencoders_of_images_are_taken(name):
    module = autoencoder(name, TAKEN[name])
    lowtide.fit(module)
    lowtide.unfit(module)


@pytest.mark.slow
@pytest.mark.parametrize("name", TAKEN)
def test_autoencoders_of_images_give_what_they_gave(name):
    module = autoencoder(name, TAKEN[name])
    channels = module.config.latent_channels
    with torch.no_grad():
        images, coded = torch.rand(1, 3, 40, 24) * 2 - 1, torch.randn(1, channels, 20, 12)
        wanted = module.encoder(images), module.decode(coded).sample
        lowtide.fit(module, budget="64MiB", pages="memory")
        assert same(module.encoder(images), wanted[0])
        assert same(module.decode(coded).sample, wanted[1])


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_video_and_sound_are_refused(name):
    config, match = REFUSED[name]
    refused(autoencoder(name, config), match)


@pytest.mark.parametrize("name", HALF)
def test_a_part_that_cannot_be_fitted_is_named(name):
    config, match = HALF[name]
    module = autoencoder(name, config)
    hint = refused(module, match)
    assert "lowtide.fit(module, parts=('encoder',))" in hint
    lowtide.fit(module, parts=("encoder",))


@pytest.mark.slow
@pytest.mark.parametrize("name", HALF)
def test_the_other_part_gives_what_it_gave(name):
    module = autoencoder(name, HALF[name][0])
    sample = torch.rand(1, 3, 24, 20)
    with torch.no_grad():
        wanted = module.encoder(sample)
        lowtide.fit(module, parts=("encoder",), budget="64MiB", pages="memory")
        assert same(module.encoder(sample), wanted)
        lowtide.unfit(module)
        assert torch.equal(module.encoder(sample), wanted)


def test_a_text_encoder_is_refused():
    from transformers import T5Config, T5EncoderModel

    config = T5Config(d_model=8, d_ff=8, num_layers=1, num_heads=2, d_kv=4, vocab_size=10)
    refused(T5EncoderModel(config).eval(), "encoder of this T5EncoderModel takes input_ids")


def test_features_of_several_sizes_are_refused():
    class Features(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Conv2d(3, 3, 3, stride=2) for _ in range(2)])

        def forward(self, image):
            first = self.layers[0](image)
            return [first, self.layers[1](first)]

    module = nn.Module().eval()
    module.encoder = Features().eval()
    refused(module, "does not map one image to one image: it returns 1×3×63×63, 1×3×31×31")


def test_parts_are_chosen():
    vae = small_vae()
    vae.enable_tiling()
    lowtide.fit(vae, parts=["decoder"])
    assert vae.use_tiling  # of the encoder, which is as it was
    assert type(vae.encoder) is type(small_vae().encoder)
    with pytest.raises(UsageError, match="decoder of this AutoencoderKL is fitted already"):
        lowtide.fit(vae)
    lowtide.unfit(vae)
    with pytest.raises(UsageError, match="quant_conv"):
        lowtide.fit(vae, parts=["quant_conv"])


def test_an_autoencoder_may_have_one_part():
    vae = small_vae()
    vae.encoder = None
    lowtide.fit(vae)
    with pytest.raises(UsageError, match="has no encoder to stream"):
        lowtide.fit(vae, parts=["encoder"])
