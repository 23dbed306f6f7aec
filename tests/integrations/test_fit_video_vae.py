"""`lowtide.fit` of `VideoVAE`, whose norms are of single frames, against its own slices."""

import pickle
from copy import deepcopy

import pytest
import torch

import lowtide
from lowtide import BudgetError, UsageError
from lowtide.integrations.fitted_module import _streams
from support.tiny_video_vae import tiny_video_vae


def clip(frames, height, width, batch=1):
    random = torch.Generator().manual_seed(1)
    return torch.rand((batch, 3, frames, height, width), generator=random) * 2 - 1


@torch.no_grad()
def results(vae, given, latents):
    return vae.encode(given), vae.decode(latents)


@torch.no_grad()
def allowed(vae, given, latents):
    """Results, and how far others may be from them: twice what roundings of its own make."""
    wanted = results(vae, given, latents)
    vae.disable_slicing()
    others = [results(vae, given, latents)]
    vae.enable_slicing()
    others.append(results(deepcopy(vae).double(), given.double(), latents.double()))
    bounds = [
        2 * max(float((one - due).abs().max()) for one in all_of)
        for due, *all_of in zip(wanted, *others, strict=True)
    ]
    assert max(bounds) <= 3e-5
    return wanted, bounds


def most_bands(vae, part):
    """Most bands of a segment."""
    plan = _streams[vae][part].chunks._prepared[1]
    return max(max(run.prepared.layout.bands) for run in plan.runs)


def test_clips_run_in_chunks_with_norms_of_single_frames():
    vae = tiny_video_vae(block_out_channels=(8, 8, 8, 8))
    given = clip(5, 40, 24)
    with torch.no_grad():
        latents = vae.encode(given)
    wanted, bounds = allowed(vae, given, latents)
    lowtide.fit(vae, budget="1GiB")
    found = results(vae, given, latents)
    for one, due, bound in zip(found, wanted, bounds, strict=True):
        assert one.shape == due.shape and (one - due).abs().max() <= bound
    assert not vae.use_slicing
    with pytest.raises(UsageError, match="VideoVAE is fitted already"):
        lowtide.fit(vae)
    lowtide.unfit(vae)
    assert vae.use_slicing
    assert all(map(torch.equal, results(vae, given, latents), wanted))


@pytest.mark.slow
def test_batches_copies_and_the_least_budget():
    vae, given = tiny_video_vae(), clip(5, 160, 24, batch=2)
    with torch.no_grad():
        latents = vae.encode(given)
    wanted, bounds = allowed(vae, given, latents)
    lowtide.fit(vae, budget="1MiB")
    with pytest.raises(BudgetError) as refusal, torch.no_grad():
        vae.decode(latents)
    lowtide.fit(lowtide.unfit(vae), budget=refusal.value.smallest)
    with torch.no_grad():
        assert (vae.decode(latents) - wanted[1]).abs().max() <= bounds[1]
        assert most_bands(vae, "decoder") > 1
        other = pickle.loads(pickle.dumps(vae))
        other.decoder.conv_out.bias.add_(1)
        assert (other.decode(latents) - wanted[1] - 1).abs().max() <= bounds[1] + 1e-6
        one = vae.decode(latents[:, :, :1])
        assert (one - wanted[1][:, :, :1]).abs().max() <= bounds[1]
