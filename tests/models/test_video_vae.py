"""Video autoencoder of SeedVR2's shape: slices, sizes, samples and files."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from lowtide import ModelError, UsageError
from lowtide.models.video_vae import VideoVAE, VideoVAEConfig
from support.tiny_video_vae import tiny_video_vae


def clip(frames=9, height=24, width=16, batch=1):
    random = torch.Generator().manual_seed(1)
    return torch.rand((batch, 3, frames, height, width), generator=random) * 2 - 1


def test_the_full_size_has_the_tensors_of_seedvr2():
    with torch.device("meta"):
        state = VideoVAE().state_dict()
    assert len(state) == 250
    assert sum(one.numel() for one in state.values()) == 250_648_227
    for name, shape in (
        ("encoder.conv_in.weight", (128, 3, 3, 3, 3)),
        ("encoder.down_blocks.0.downsamplers.0.conv.weight", (128, 128, 1, 3, 3)),
        ("encoder.down_blocks.2.downsamplers.0.conv.weight", (512, 512, 3, 3, 3)),
        ("encoder.down_blocks.1.resnets.0.conv_shortcut.weight", (256, 128, 1, 1, 1)),
        ("encoder.conv_out.weight", (32, 512, 3, 3, 3)),
        ("decoder.conv_in.weight", (512, 16, 3, 3, 3)),
        ("decoder.mid_block.attentions.0.to_out.0.weight", (512, 512)),
        ("decoder.mid_block.attentions.0.group_norm.weight", (512,)),
        ("decoder.up_blocks.1.upsamplers.0.upscale_conv.weight", (4096, 512, 1, 1, 1)),
        ("decoder.up_blocks.2.upsamplers.0.upscale_conv.weight", (1024, 256, 1, 1, 1)),
        ("decoder.up_blocks.3.resnets.2.conv2.weight", (128, 128, 3, 3, 3)),
        ("decoder.conv_norm_out.weight", (128,)),
    ):
        assert tuple(state[name].shape) == shape


@torch.no_grad()
def test_slices_give_what_the_whole_clip_gives():
    vae, given = tiny_video_vae(), clip(batch=2)
    latents = vae.encode(given)
    made = vae.decode(latents)
    assert latents.shape == (2, 4, 3, 3, 2) and made.shape == given.shape
    vae.disable_slicing()
    assert (vae.encode(given) - latents).abs().max() <= 1e-5
    assert (vae.decode(latents) - made).abs().max() <= 1e-5
    # two latents at a time
    first, state = vae.decode_slice(latents[:, :, :2])
    rest, _ = vae.decode_slice(latents[:, :, 2:], state)
    assert first.shape[2] == 5 and (torch.cat([first, rest], 2) - made).abs().max() <= 1e-5


@torch.no_grad()
def test_frames_depend_on_earlier_ones_only():
    vae, given = tiny_video_vae(), clip()
    before = vae.encode(given)
    given[:, :, 5:] = 0
    after = vae.encode(given)
    assert torch.equal(after[:, :, :2], before[:, :, :2])
    assert not torch.equal(after[:, :, 2:], before[:, :, 2:])


@torch.no_grad()
@pytest.mark.parametrize("frames", [1, 2, 6])
def test_any_number_of_frames_and_any_size(frames):
    vae, given = tiny_video_vae(), clip(frames, 19, 13)
    latents = vae.encode(given)
    made = vae.decode(latents, frames=frames, size=(19, 13))
    assert latents.shape[2:] == ((frames + 6) // 4, 3, 2)
    assert made.shape == given.shape == vae(given).shape
    filled = torch.cat([given, *[given[:, :, -1:]] * (-(frames - 1) % 4)], 2)
    filled = torch.nn.functional.pad(filled, (0, 3, 0, 5, 0, 0), "replicate")
    assert torch.equal(vae.encode(filled), latents)
    with pytest.raises(UsageError, match=r"make \d frames of 24×16, not 99 of 24×16"):
        vae.decode(latents, frames=99)


@torch.no_grad()
def test_samples_do_not_depend_on_slices():
    vae, given = tiny_video_vae(), clip()
    mean, drawn = vae.encode(given), vae.encode(given, sample=True, seed=3)
    _, log_variance = vae.encode_slice(given)[0].chunk(2, 1)
    noise = (drawn - mean) / (log_variance / 2).exp()
    assert abs(noise.mean()) < 0.3 and 0.7 < noise.std() < 1.3
    vae.disable_slicing()
    assert (vae.encode(given, sample=True, seed=3) - drawn).abs().max() <= 1e-5
    short = vae.encode(given[:, :, :5], sample=True, seed=3)
    assert (short - drawn[:, :, :2]).abs().max() <= 1e-5
    assert not torch.equal(vae.encode(given, sample=True, seed=4), drawn)


@torch.no_grad()
def test_files(tmp_path):
    vae, given = tiny_video_vae(), clip()
    wanted = vae.encode(given)
    for path in (tmp_path / "folder", tmp_path / "vae.safetensors"):
        vae.save(path)
        found = VideoVAE.load(path)
        assert found.config == vae.config and torch.equal(found.encode(given), wanted)
    config = json.loads((tmp_path / "folder/config.json").read_text())
    assert config["_class_name"] == "VideoVAE" and config["latent_channels"] == 4


def test_a_bare_file_has_the_sizes_of_its_tensors(tmp_path):
    config = VideoVAEConfig(block_out_channels=(32, 32, 64, 64), layers_per_block=1)
    state = VideoVAE(config).half().state_dict()
    save_file(state, path := tmp_path / "vae.safetensors")
    found = VideoVAE.load(path)
    assert found.config == config
    assert torch.equal(found.state_dict()["decoder.conv_in.bias"], state["decoder.conv_in.bias"])

    flat = {**state, "encoder.conv_in.weight": state["encoder.conv_in.weight"][:, :, 0]}
    for wrong, text in (
        ({"weight": torch.zeros(2)}, "its tensors have other names"),
        ({k: v for k, v in state.items() if "attentions" not in k}, "is missing, not"),
        ({k: v for k, v in state.items() if "down_blocks.3" not in k}, "levels .* are missing"),
        (flat, r"encoder.conv_in.weight is \(32, 3, 3, 3\), not \(32, 3, 3, 3, 3\)"),
    ):
        save_file({name: one.contiguous() for name, one in wrong.items()}, path)
        with pytest.raises(ModelError, match=text):
            VideoVAE.load(path)
    assert load_file(path)


def test_bad_folders_and_inputs(tmp_path):
    folder = tmp_path / "vae"
    with pytest.raises(ModelError, match="there is no vae"):
        VideoVAE.load(folder)
    folder.mkdir()
    with pytest.raises(ModelError, match="there is no diffusion_pytorch_model"):
        VideoVAE.load(folder)
    tiny_video_vae().save(folder)
    for text, said in (
        ('{"_class_name": "AutoencoderKL"}', "configuration of AutoencoderKL, not of a VideoVAE"),
        ('{"_class_name": "VideoVAE", "depth": 3}', "depth: Extra inputs"),
        ("[]", "configuration of None"),
        ("{", "config.json is damaged"),
    ):
        (folder / "config.json").write_text(text)
        with pytest.raises(ModelError, match=said):
            VideoVAE.load(folder)
    with pytest.raises(UsageError, match="VideoVAE: block_out_channels: 3 groups do not divide 8"):
        VideoVAEConfig.of(block_out_channels=(8, 8, 8, 8), norm_num_groups=3)
    vae = tiny_video_vae()
    for wrong in (clip()[0], clip()[:, :2], clip()[:, :, :0]):
        with pytest.raises(UsageError, match="a clip of this model: the shape is"):
            vae.encode(wrong)
    with pytest.raises(UsageError, match=r"floating point, not torch\.int64"):
        vae.encode(clip().long())
    with pytest.raises(UsageError, match="latents of this model: the shape is"):
        vae.decode(clip())
