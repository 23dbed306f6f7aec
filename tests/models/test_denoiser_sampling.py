"""Schedules, predictions and steps of the denoiser: from a measurement to the clean image."""

from itertools import pairwise
from typing import get_args

import numpy as np
import pytest
import torch

from lowtide import UsageError
from lowtide.jobs.denoise.states import SamplingStepSink, ScratchImage
from lowtide.models.denoiser.config import SchedulerName, SlimUNetConfig
from lowtide.models.denoiser.denoiser import Denoiser, preconditioning_terms
from lowtide.models.denoiser.sampling import (
    NoiseSchedule,
    earlier_predictions,
    row_noise,
    sampling_steps,
)
from lowtide.models.denoiser.slim_unet import SlimUNet

SIGMA = 25 / 255
SCHEDULERS = get_args(SchedulerName)


def sample(steps, state, predict, seed=0):
    """The last state, with ``predict(state, sigma)`` for a network."""
    predictions = []
    for step in steps:
        clean = predict(state, step.sigma)
        earlier = predictions[: len(step.earlier)]
        state = step.advance(state, clean, earlier, seed=seed, first=0)
        predictions.insert(0, clean)
    return state


def wavy(state, sigma):
    """A prediction that no solver is exact for."""
    return np.tanh(1.3 * state + 0.3 * np.sin(5 * state) + sigma)


@pytest.fixture
def measured():
    return np.random.default_rng(0).normal(size=(5, 7, 3))


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_every_count_of_steps_is_spaced_anew_and_ends_at_the_clean_image(scheduler, measured):
    """With an oracle, exactly; up to the largest level of any image."""
    clean, state = np.float32(measured[:2, :2]), np.float32(measured[2:4, :2])
    for count in range(1, 51):
        steps = sampling_steps(scheduler, SIGMA, count)
        levels = [steps[0].sigma, *(step.next_sigma for step in steps)]
        assert len(steps) == count and (levels[0], levels[-1]) == (SIGMA, 0)
        assert all(now > after for now, after in pairwise(levels))
        assert np.array_equal(sample(steps, state, lambda *_: clean), clean)
        for step in steps:  # the noise that stays and that is added are of the next level
            total = (step.kept * step.sigma) ** 2 + step.drawn**2
            assert total**0.5 == pytest.approx(step.next_sigma)
            assert len(step.earlier) <= earlier_predictions(scheduler, count)
    three, five = (sampling_steps(scheduler, 1.0, count) for count in (3, 5))
    assert not {step.sigma for step in three[1:]} & {step.sigma for step in five}
    assert np.isfinite(sample(five, measured, wavy)).all()


def test_schedulers_differ(measured):
    """Those that look at earlier steps do so where there are three or more."""
    for count, others in ((2, {"ddpm", "flow"}), (3, set(SCHEDULERS) - {"ddim"})):
        found = {
            name: sample(sampling_steps(name, SIGMA, count), np.float32(measured), wavy).tobytes()
            for name in SCHEDULERS
        }
        assert {name for name in found if found[name] != found["ddim"]} == others
        assert len(set(found.values())) == len(others) + 1


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 14, 15, 20, 50])
def test_unipc_is_that_of_diffusers(count, measured):
    """At the same levels, which its flow takes from a list."""
    diffusers = pytest.importorskip("diffusers")
    steps = sampling_steps("unipc", SIGMA, count)
    levels = [2 * step.sigma for step in steps]
    theirs = diffusers.UniPCMultistepScheduler(prediction_type="sample", use_flow_sigmas=True)
    theirs.set_timesteps(sigmas=np.array([level / (1 + level) for level in levels]))
    state = torch.from_numpy(measured) / (1 + levels[0])
    for time, level in zip(theirs.timesteps, levels, strict=True):
        clean = torch.from_numpy(wavy(state.numpy() * (1 + level), level / 2))
        state = theirs.step(clean, time, state).prev_sample
    assert np.abs(sample(steps, measured, wavy) - state.numpy()).max() < 1e-5


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # its own
@pytest.mark.parametrize("count", [1, 2, 3, 4, 10, 12, 15, 20, 60])
def test_dpmsolver_is_that_of_diffusers(count, measured):
    """At the same times, which it takes from a list of whole ones."""
    diffusers = pytest.importorskip("diffusers")
    times = [60 * left // count for left in range(count, 0, -1)]
    steps = sampling_steps("dpmsolver++", NoiseSchedule().sigma_at(60) / 2, count)
    theirs = diffusers.DPMSolverMultistepScheduler(prediction_type="sample")
    theirs.set_timesteps(timesteps=[time - 1 for time in times])  # its first time is 0
    shrunk = [(1 + (2 * step.sigma) ** 2) ** -0.5 for step in steps]
    state = torch.from_numpy(measured) * shrunk[0]
    for time, scale, step in zip(theirs.timesteps, shrunk, steps, strict=True):
        clean = torch.from_numpy(wavy(state.numpy() / scale, step.sigma))
        state = theirs.step(clean, time, state).prev_sample
    assert np.abs(sample(steps, measured, wavy) - state.numpy()).max() < 1e-5


def test_second_order_needs_fewer_steps(measured):
    """Against the solution in 400 steps."""
    exact = sample(sampling_steps("dpmsolver++", 1.0, 400), measured, wavy)
    errors = {
        name: np.abs(sample(sampling_steps(name, 1.0, 20), measured, wavy) - exact).mean()
        for name in ("ddim", "dpmsolver++", "unipc")
    }
    assert max(errors["unipc"], errors["dpmsolver++"]) < 0.85 * errors["ddim"]


def test_the_noise_of_ddpm_is_that_of_the_posterior():
    step = sampling_steps("ddpm", SIGMA, 4)[1]
    now, after = (1 / (1 + (2 * level) ** 2) for level in (step.sigma, step.next_sigma))
    variance = (1 - after) / (1 - now) * (1 - now / after)
    assert 2 * step.drawn * after**0.5 == pytest.approx(variance**0.5)
    half = sampling_steps("ddim", SIGMA, 4, eta=0.5)[1]
    assert half.drawn == pytest.approx(step.drawn / 2) and half.kept > step.kept


@pytest.mark.parametrize("scheduler", ["ddpm", "unipc"])
def test_states_on_disk_are_the_same_for_any_bands(scheduler, measured, tmp_path):
    rows, ends = np.float32(measured), []
    steps = sampling_steps(scheduler, SIGMA, 6)
    for height in (1, 2, 5):
        count = 2 + earlier_predictions(scheduler, len(steps))
        state, after, *earlier = (ScratchImage(rows.shape, tmp_path) for _ in range(count))
        state.write(0, rows)
        for step in steps:
            sink = SamplingStepSink(step, state, after, earlier, seed=3)
            for first in range(0, len(rows), height):
                sink.write(first, wavy(state.read(first, first + height), step.sigma))
            state, after = after, state
        ends.append(state.read(0, len(rows)))
        for file in (state, after, *earlier):
            file.close()
    assert np.array_equal(ends[0], sample(steps, rows, wavy, seed=3))
    assert np.array_equal(ends[0], ends[1]) and np.array_equal(ends[0], ends[2])


def test_noise_is_that_of_the_row():
    """Whatever the band; another seed, sample and step have others."""
    whole = row_noise(1, 0, 2, 0, (40, 30, 3))
    assert np.array_equal(whole[11:20], row_noise(1, 0, 2, 11, (9, 30, 3)))
    for other in ((2, 0, 2), (1, 1, 2), (1, 0, 3)):
        assert not np.array_equal(whole, row_noise(*other, 0, (40, 30, 3)))
    assert abs(whole.std() - 1) < 0.05 and abs(whole.mean()) < 0.05


class Oracle(SlimUNet):
    """A network that predicts what it should of a known image."""

    def __init__(self, config: SlimUNetConfig, clean: torch.Tensor) -> None:
        super().__init__(config)
        self.clean, self.level = 2 * clean - 1, 0.0

    def modulation(self, sigma, parameters=None):
        self.level = sigma.double()
        return torch.zeros(())

    def forward(self, x, film):
        shrunk = (1 + self.level**2) ** -0.5
        noise = (x / shrunk - self.clean) / self.level
        right = {"v": shrunk * (noise - self.level * self.clean), "epsilon": noise}
        return right.get(self.config.prediction, self.clean)


def test_the_three_predictions_agree():
    """What they mean: from the right answer follows the clean image, at every step."""
    clean = torch.rand(1, 3, 6, 5, dtype=torch.float64)
    noisy, found = clean + SIGMA * torch.randn_like(clean), {}
    for prediction in ("v", "epsilon", "sample"):
        config = SlimUNetConfig(prediction=prediction)
        denoiser = Denoiser(config).double()
        oracle = denoiser.unet = Oracle(config, clean)
        denoiser.film = torch.zeros(())

        def predict(state, sigma, denoiser=denoiser, oracle=oracle):
            denoiser.set_level(sigma)
            oracle.level = oracle.level.new_tensor(2 * sigma)
            return denoiser(torch.from_numpy(state)[None]).numpy()[0]

        assert preconditioning_terms(prediction, 0.3)[0] == pytest.approx((1 + 0.3**2) ** -0.5)
        found[prediction] = sample(sampling_steps("ddim", SIGMA, 4), noisy[0].numpy(), predict)
        assert np.abs(found[prediction] - clean[0].numpy()).max() < 1e-7, prediction


def test_schedules_reach_every_level():
    for name in ("linear", "flow"):
        schedule = NoiseSchedule(name)
        for sigma in (0.001, 0.05, 0.4, 3.0):
            assert schedule.sigma_at(schedule.time_of(sigma)) == pytest.approx(sigma)


def test_what_cannot_be_sampled_is_refused():
    for count in (0, 1001):
        with pytest.raises(UsageError, match="are not between 1 and the 1000 times"):
            sampling_steps("ddim", SIGMA, count)
    for sigma in (0, -0.1, float("nan")):
        with pytest.raises(UsageError, match="starts at a noise level above 0"):
            sampling_steps("ddim", sigma, 4)
    with pytest.raises(UsageError, match="ends at a noise level of 157") as caught:
        sampling_steps("ddim", 100, 4)
    assert "flow" in caught.value.hint
