"""Joint sample paths: what each sampler keeps of residuals, and how one is chosen."""

import tracemalloc

import numpy as np
import pytest
import scoringrules

from lowtide.models.forecaster.paths import PATHS, ForecastDistribution, choose_paths, energy_score

COUNT, HORIZON, VARIABLES = 600, 12, 2


def residuals(memory: float = 0.9, seed: int = 0) -> np.ndarray:
    """Skewed residuals [n, H, D] whose steps have a memory and whose variables share it."""
    draw = np.random.default_rng(seed)
    paths = draw.normal(size=(COUNT, HORIZON, VARIABLES))
    paths[..., 1] = 0.8 * paths[..., 0] + 0.6 * paths[..., 1]
    for step in range(1, HORIZON):
        paths[:, step] = memory * paths[:, step - 1] + np.sqrt(1 - memory**2) * paths[:, step]
    return np.expm1(0.5 * paths).astype(np.float32)


def drawn(name: str, given: np.ndarray, samples: int = 2000, origin: int = 7) -> np.ndarray:
    paths = np.empty((samples, *given.shape[1:]))
    PATHS[name](given).sample(origin, paths, seed=0)
    return paths


@pytest.mark.parametrize("name", list(PATHS))
def test_each_step_keeps_its_quantiles_and_joint_paths_their_sums(name):
    given = residuals()
    made, levels = drawn(name, given), (0.05, 0.25, 0.5, 0.75, 0.95)
    np.testing.assert_allclose(
        np.quantile(made, levels, axis=0), np.quantile(given, levels, axis=0), atol=0.25
    )
    spread, truth = (array.sum(axis=(1, 2)).std() for array in (made, given))
    if name == "independent":
        assert spread < 0.5 * truth
    else:
        assert spread == pytest.approx(truth, rel=0.1)


@pytest.mark.parametrize("name", list(PATHS))
def test_a_window_has_its_paths_and_few_are_the_first_of_many(name):
    given = residuals()
    many = drawn(name, given, 100)
    np.testing.assert_array_equal(many[:33], drawn(name, given, 33))
    assert (many != drawn(name, given, 100, origin=8)).any()
    if name == "bootstrap":  # without repetition while there are enough
        assert len(np.unique(drawn(name, given, COUNT), axis=0)) == COUNT


def test_the_choice_is_what_the_residuals_are_like():
    origins, scales = np.arange(COUNT) * 3, np.ones((COUNT, HORIZON, VARIABLES))
    joint = choose_paths("auto", residuals(), scales, origins)
    assert joint.name in ("bootstrap", "copula")
    assert set(joint.energy) == set(PATHS)
    assert joint.energy[joint.name] < joint.energy["independent"]
    white = np.random.default_rng(1).normal(size=(COUNT, 200, 1))
    few = choose_paths("auto", white[:50], scales[:50, :1, :1], origins[:50])
    assert (few.name, few.energy) == ("bootstrap", {})
    assert choose_paths("copula", residuals(), scales, origins).name == "copula"


def test_the_energy_score_is_that_of_scoringrules():
    draw = np.random.default_rng(0)
    truth, samples = 1e6 + draw.normal(size=(6, 3)), 1e6 + draw.normal(size=(40, 6, 3))
    flat = samples.reshape(40, -1)
    expected = scoringrules.es_ensemble(truth.ravel(), flat, estimator="fair")
    assert energy_score(truth, samples) == pytest.approx(expected)
    truth[2, 1] = np.nan
    seen = np.isfinite(truth.ravel())
    expected = scoringrules.es_ensemble(truth.ravel()[seen], flat[:, seen], estimator="fair")
    assert energy_score(truth, samples) == pytest.approx(expected)
    assert np.isnan(energy_score(np.full((6, 3), np.nan), samples))


@pytest.mark.parametrize("name", list(PATHS))
def test_beyond_the_result_memory_does_not_grow_with_the_samples(name):
    shape = 96, 7
    sampler = PATHS[name](np.random.default_rng(0).normal(size=(64, *shape)))
    windows, beyond = ForecastDistribution(np.arange(3), *np.ones((2, 3, *shape))), []
    windows.sample(sampler, 20, seed=0)  # what is made once
    for samples in (20, 500):
        tracemalloc.start()
        result = windows.sample(sampler, samples, seed=0)
        beyond.append(tracemalloc.get_traced_memory()[1] - result.nbytes)
        tracemalloc.stop()
    assert beyond[1] == pytest.approx(beyond[0], rel=0.05)
