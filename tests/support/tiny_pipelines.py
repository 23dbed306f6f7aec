"""Pipelines of diffusers as their users call them, with small networks of random weights. Prompts
are embedded already, so that no tokenizer is needed. Each gives a pipeline and how it is called."""

import diffusers
import torch
from diffusers import (
    AutoencoderDC,
    AutoencoderKL,
    AutoencoderTiny,
    ControlNetModel,
    DDIMScheduler,
    DDPMScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxTransformer2DModel,
    LCMScheduler,
    SanaTransformer2DModel,
    SD3Transformer2DModel,
    UNet2DConditionModel,
)

from support.tiny_autoencoders import DC, KL, TINY, built

_WIDTH, _POOLED = 8, 8
_LEVELS = {"block_out_channels": (8, 16), "norm_num_groups": 4, "layers_per_block": 1}
_DOWN = ("DownBlock2D", "CrossAttnDownBlock2D")
_NO_CHECKER = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}


def unet(**changes):
    config = {
        "sample_size": 16,
        "cross_attention_dim": _WIDTH,
        "attention_head_dim": 4,
        "down_block_types": _DOWN,
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        **_LEVELS,
    }
    return built(UNet2DConditionModel, **{**config, **changes})


def kl(**changes):
    return built(AutoencoderKL, **{**KL, "sample_size": 32, **changes})


def embedded(rows=5, width=_WIDTH):
    return torch.linspace(-0.2, 0.2, rows * width).reshape(1, rows, width)


def prompt():
    return {"prompt_embeds": embedded(), "negative_prompt_embeds": -embedded()}


def images(pipe, call):
    pipe.set_progress_bar_config(disable=True)
    draw = torch.Generator().manual_seed(0)
    return pipe(**call, num_inference_steps=2, output_type="pt", generator=draw).images


def picture(height=40, width=48):
    return torch.rand(1, 3, height, width, generator=torch.Generator().manual_seed(3))


def mask():
    return (picture()[:, :1] > 0.5).float()


def ddim():
    return DDIMScheduler(clip_sample=False, steps_offset=1)


def stable_diffusion(name="StableDiffusionPipeline", **changes):
    own = {"vae": kl(), "unet": unet(), "scheduler": ddim(), **_NO_CHECKER, **changes}
    return getattr(diffusers, name)(text_encoder=None, tokenizer=None, **own)


SIZE = {"height": 40, "width": 48}


def text_to_image():
    return stable_diffusion(), {**prompt(), **SIZE, "num_images_per_prompt": 2}


def with_tiny_autoencoder():
    return stable_diffusion(vae=built(AutoencoderTiny, **TINY)), {**prompt(), **SIZE}


def image_to_image():
    pipe = stable_diffusion("StableDiffusionImg2ImgPipeline")
    return pipe, {**prompt(), "image": picture(), "strength": 0.9}


def inpainting():
    pipe = stable_diffusion("StableDiffusionInpaintPipeline", unet=unet(in_channels=9))
    return pipe, {**prompt(), **SIZE, "image": picture(), "mask_image": mask()}


def inpainting_by_instruction():
    pipe = stable_diffusion("StableDiffusionInstructPix2PixPipeline", unet=unet(in_channels=8))
    return pipe, {**prompt(), "image": picture()}


def control():
    net = built(
        ControlNetModel,
        cross_attention_dim=_WIDTH,
        attention_head_dim=4,
        down_block_types=_DOWN,
        conditioning_embedding_out_channels=(4, 8),
        **_LEVELS,
    )
    pipe = stable_diffusion("StableDiffusionControlNetPipeline", controlnet=net)
    return pipe, {**prompt(), **SIZE, "image": picture()}


def latent_consistency():
    pipe = stable_diffusion(
        "LatentConsistencyModelPipeline",
        unet=unet(time_cond_proj_dim=16),
        scheduler=LCMScheduler(),
    )
    return pipe, {"prompt_embeds": embedded(), **SIZE}


def four_times():
    three = {
        "block_out_channels": (8, 8, 8),
        "down_block_types": ("DownEncoderBlock2D",) * 3,
        "up_block_types": ("UpDecoderBlock2D",) * 3,
    }
    pipe = diffusers.StableDiffusionUpscalePipeline(
        vae=kl(**three, scaling_factor=0.08333),
        text_encoder=None,
        tokenizer=None,
        unet=unet(in_channels=7, num_class_embeds=100),
        low_res_scheduler=DDPMScheduler(),
        scheduler=ddim(),
        max_noise_level=99,
    )
    return pipe, {**prompt(), "image": picture(16, 12), "noise_level": 20}


def latents_twice():
    pipe = diffusers.StableDiffusionLatentUpscalePipeline(
        vae=kl(),
        text_encoder=None,
        tokenizer=None,
        unet=unet(
            in_channels=8,
            out_channels=5,
            time_cond_proj_dim=128 + _POOLED,
            time_embedding_type="fourier",
        ),
        scheduler=EulerDiscreteScheduler(prediction_type="sample"),
    )
    pooled = embedded(1, _POOLED)[0]
    more = {"pooled_prompt_embeds": pooled, "negative_pooled_prompt_embeds": -pooled}
    return pipe, {**prompt(), **more, "image": torch.rand(1, 4, 8, 8)}


def xl(dtype=torch.float32):
    pipe = diffusers.StableDiffusionXLPipeline(
        vae=kl(force_upcast=True),
        text_encoder=None,
        text_encoder_2=None,
        tokenizer=None,
        tokenizer_2=None,
        unet=unet(
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=6 * 8 + _POOLED,
        ),
        scheduler=EulerDiscreteScheduler(),
        add_watermarker=False,
    ).to(dtype)
    pooled = embedded(1, _POOLED)[0]
    more = {"pooled_prompt_embeds": pooled, "negative_pooled_prompt_embeds": -pooled}
    call = {name: value.to(dtype) for name, value in {**prompt(), **more}.items()}
    return pipe, {**call, **SIZE}


def xl_in_half():
    """Whose autoencoder is cast to fp32 for each image, in place, and back."""
    return xl(torch.float16)


def without_quantizers(channels):
    return kl(
        latent_channels=channels, use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.1
    )


def diffusion_3():
    net = built(
        SD3Transformer2DModel,
        sample_size=32,
        patch_size=1,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        attention_head_dim=4,
        num_attention_heads=2,
        caption_projection_dim=8,
        joint_attention_dim=_WIDTH,
        pooled_projection_dim=_POOLED,
    )
    none = dict.fromkeys(
        f"{kind}{which}" for kind in ("text_encoder", "tokenizer") for which in ("", "_2", "_3")
    )
    pipe = diffusers.StableDiffusion3Pipeline(
        transformer=net,
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=without_quantizers(4),
        **none,
    )
    pooled = embedded(1, _POOLED)[0]
    more = {"pooled_prompt_embeds": pooled, "negative_pooled_prompt_embeds": -pooled}
    return pipe, {**prompt(), **more, **SIZE}


NO_TEXT = dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))


def flux(vae=None, **changes):
    config = {
        "patch_size": 1,
        "in_channels": 16,
        "num_layers": 1,
        "num_single_layers": 1,
        "attention_head_dim": 8,
        "num_attention_heads": 1,
        "joint_attention_dim": _WIDTH,
        "pooled_projection_dim": _POOLED,
        "axes_dims_rope": (2, 2, 4),
    }
    pipe = diffusers.FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=without_quantizers(4) if vae is None else vae,
        transformer=built(FluxTransformer2DModel, **{**config, **changes}),
        **NO_TEXT,
    )
    more = {"pooled_prompt_embeds": embedded(1, _POOLED)[0]}
    return pipe, {"prompt_embeds": embedded(), **more, **SIZE}


def sana():
    net = built(
        SanaTransformer2DModel,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        num_attention_heads=2,
        attention_head_dim=4,
        num_cross_attention_heads=2,
        cross_attention_head_dim=4,
        cross_attention_dim=8,
        caption_channels=_WIDTH,
        sample_size=16,
        patch_size=1,
    )
    pipe = diffusers.SanaPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=built(AutoencoderDC, **DC),
        transformer=net,
        scheduler=FlowMatchEulerDiscreteScheduler(),
    )
    seen = torch.ones(1, 5)
    more = {"prompt_attention_mask": seen, "negative_prompt_attention_mask": seen}
    size = {"height": 32, "width": 64, "use_resolution_binning": False, "negative_prompt": None}
    return pipe, {**prompt(), **more, **size, "prompt": None}


QUICK = (text_to_image, image_to_image, xl_in_half)
MORE = (
    with_tiny_autoencoder,
    inpainting,
    inpainting_by_instruction,
    control,
    latent_consistency,
    four_times,
    latents_twice,
    xl,
    diffusion_3,
    flux,
    sana,
)
