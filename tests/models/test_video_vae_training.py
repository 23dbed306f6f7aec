"""A small `VideoVAE` learns to give back a clip: slow, a minute or two."""

import pytest
import torch
from skimage import data

from lowtide.models.video_vae import VideoVAE, VideoVAEConfig

STEPS, SIDE, FRAMES = 500, 32, 5


def moving_picture():
    """A window that moves over a photograph: (1, 3, T, H, W) in -1..1."""
    picture = torch.from_numpy(data.astronaut()[::4, ::4].copy()).permute(2, 0, 1) / 127.5 - 1
    frames = [
        picture[:, 20 + 2 * at : 20 + 2 * at + SIDE, 30 + at : 30 + at + SIDE]
        for at in range(FRAMES)
    ]
    return torch.stack(frames, 1)[None]


def psnr(one, other):
    return float(-10 * ((one - other) / 2).square().mean().log10())


@pytest.mark.slow
def test_a_decoded_clip_resembles_what_was_encoded(tmp_path):
    torch.manual_seed(0)
    sizes = {"block_out_channels": (16, 16, 32, 32), "layers_per_block": 1, "norm_num_groups": 4}
    vae, clip = VideoVAE(VideoVAEConfig.of(**sizes)), moving_picture()
    vae.disable_slicing()
    optimizer = torch.optim.AdamW(vae.parameters(), 3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for _ in range(STEPS):
        loss = (vae(clip) - clip).square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    vae.save(tmp_path)
    with torch.no_grad():
        found = VideoVAE.load(tmp_path)(clip)
    flat = clip.mean((2, 3, 4), keepdim=True).expand_as(clip)
    assert psnr(found, clip) > psnr(flat, clip) + 8
    # details too, which a blurred picture has not, and motion
    for dim in (-1, -2, 2):
        edges = torch.stack([found.diff(dim=dim).flatten(), clip.diff(dim=dim).flatten()])
        assert torch.corrcoef(edges)[0, 1] > 0.5
