"""The closed-form forecaster: what it finds, what it may see, what it says of its errors."""

import numpy as np
import pytest

from lowtide import InputError
from lowtide.models.forecaster import forecaster
from lowtide.models.forecaster.forecaster import RidgeForecaster
from lowtide.models.forecaster.ridge import RidgeConfig, fit_ridge, ridge_moments
from lowtide.models.forecaster.windows import forward_fill, target_windows

SEASON, HORIZON = 12, 18


def series(steps: int = 700, variables: int = 2, noise: float = 0.3, seed: int = 0) -> np.ndarray:
    """A season with noise that has a memory, [T, D]."""
    draw = np.random.default_rng(seed)
    time = np.arange(steps)[:, None]
    season = np.sin(2 * np.pi * (time / SEASON + np.arange(variables) / 3))
    shocks, drift = draw.normal(0, noise, (steps, variables)), np.zeros((steps, variables))
    for step in range(1, steps):
        drift[step] = 0.7 * drift[step - 1] + shocks[step]
    return 5 + 2 * season + drift


def fitted(values: np.ndarray, horizon: int = HORIZON) -> RidgeForecaster:
    return RidgeForecaster.fit(values, phases(len(values)), horizon=horizon, season=SEASON)


def phases(steps: int) -> np.ndarray:
    return np.arange(steps) % SEASON


def predicted(model, values, origins):
    origins = np.array(origins)
    return model.predict(values, origins, (origins[:, None] + np.arange(model.horizon)) % SEASON)


def test_a_season_without_noise_is_continued():
    values = series(noise=0.0)
    model = fitted(values[:600])
    mean = predicted(model, values[:650], [650]).mean
    np.testing.assert_allclose(mean[0], values[650 : 650 + HORIZON], atol=0.02)


def test_a_forecast_is_bit_identical_among_others():
    values = series(variables=3)
    model = fitted(values[:600])
    alone = predicted(model, values, [651])
    among = predicted(model, values, range(620, 690))
    np.testing.assert_array_equal(alone.mean[0], among.mean[31])
    np.testing.assert_array_equal(alone.scale[0], among.scale[31])
    np.testing.assert_array_equal(
        model.sample(alone, 20, seed=3)[0], model.sample(among, 20, seed=3)[31]
    )


def test_nothing_after_the_origin_or_before_the_context_is_read():
    values = series()
    model = fitted(values[:600])
    expected = predicted(model, values, [650])
    changed = values.copy()
    changed[650:], changed[: 650 - model.context] = np.nan, 1e9
    found = predicted(model, changed, [650])
    np.testing.assert_array_equal(found.mean, expected.mean)
    np.testing.assert_array_equal(found.scale, expected.scale)


def test_folds_saw_none_of_their_targets():
    values = series(noise=1.0)
    known, config = np.isfinite(values), RidgeConfig(24)
    fit = fit_ridge(values, known, config, HORIZON)
    fold = fit.folds[1]
    origins = np.arange(24, len(values) - HORIZON + 1)
    outside = origins[(origins <= fold.first - HORIZON) | (origins >= fold.last - 1 + HORIZON)]
    direct = ridge_moments(values, known, values, outside, config, HORIZON).solve(fit.penalty)
    np.testing.assert_allclose(fold.matrix, direct, atol=1e-9)


@pytest.mark.parametrize("noise", [0.1, 1.0])
def test_bands_hold_what_they_promise(noise):
    values = series(3000, noise=noise)
    model = fitted(values[:2000])
    origins = np.arange(2000, 3000 - HORIZON, 3)
    samples = model.sample(predicted(model, values, origins), 200, seed=0)
    low, high = np.quantile(samples, (0.05, 0.95), axis=1)
    truth = target_windows(values, origins, HORIZON)
    assert 0.86 <= ((truth >= low) & (truth <= high)).mean() <= 0.94


def test_paths_keep_how_steps_move_together():
    values = series(3000, noise=1.0)
    model = fitted(values[:2000])
    origins = np.arange(2000, 3000 - HORIZON, 3)
    samples = model.sample(predicted(model, values, origins), 200, seed=0)
    spread = samples.mean(axis=2).std(axis=1).mean()
    errors = (target_windows(values, origins, HORIZON) - samples.mean(axis=1)).mean(axis=1).std()
    independent = samples.std(axis=1).mean() / np.sqrt(HORIZON)
    assert spread == pytest.approx(errors, rel=0.15)
    assert spread > 1.5 * independent


def test_calm_and_wild_times_have_bands_of_their_own():
    draw = np.random.default_rng(0)
    wild = (np.arange(4000) // 200) % 2
    values = (draw.normal(size=4000) * np.where(wild, 3.0, 0.3))[:, None]
    model = fitted(values[:3000])
    origins = np.arange(3100, 3900, 10)
    scale = predicted(model, values, origins).scale[:, 0, 0]
    settled = (origins % 200) > 150
    assert scale[settled & (wild[origins] == 1)].mean() > 4 * (
        scale[settled & (wild[origins] == 0)].mean()
    )


def test_a_constant_variable_stays_constant():
    values = np.concatenate([series(variables=1), np.full((700, 1), 42.0)], axis=1)
    model = fitted(values)
    distribution = predicted(model, values, [700])
    assert model.sample(distribution, 50, seed=0)[..., 1] == pytest.approx(42.0, abs=1e-6)


def test_missing_values_stay_in_their_place():
    values = series(1200)
    holes = values.copy()
    holes[np.random.default_rng(1).random(values.shape) < 0.05] = np.nan
    holes[300:340, 1] = np.nan
    truth = values[1000:][None, :HORIZON]
    whole, with_holes = (
        predicted(fitted(given[:1000]), given[:1000], [1000]).mean for given in (values, holes)
    )
    assert np.isfinite(with_holes).all()
    assert np.abs(with_holes - truth).mean() < 1.3 * np.abs(whole - truth).mean() + 0.1


@pytest.mark.parametrize("steps", [2, 10, 19])
def test_too_short_a_history_is_refused(steps):
    with pytest.raises(InputError, match="too few for a horizon of 18"):
        fitted(series(steps))


@pytest.mark.parametrize("steps", range(30, 80, 7))
def test_short_histories_have_finite_forecasts(steps):
    values = series(steps)
    model = fitted(values, 3)
    distribution = predicted(model, values, [steps])
    assert np.isfinite(model.sample(distribution, 200, seed=0)).all()


def test_filling_forward_keeps_the_grid():
    values = np.array([[np.nan, 1.0], [2.0, np.nan], [np.nan, 3.0]])
    np.testing.assert_array_equal(forward_fill(values), [[2.0, 1.0], [2.0, 1.0], [2.0, 3.0]])


def test_wide_tables_keep_fewer_paths_and_too_wide_ones_are_refused(monkeypatch):
    phases = np.arange(120) % 24
    values = np.random.default_rng(0).normal(size=(120, 3))
    options = {"horizon": 6, "season": 24, "paths": "independent"}
    usual = RidgeForecaster.fit(values, phases, **options)
    monkeypatch.setattr(forecaster, "_PART_NUMBERS", 90)
    monkeypatch.setattr(forecaster, "_MOST_NUMBERS", 6 * 3 * 10)
    few = RidgeForecaster.fit(values, phases, **options)
    assert len(few.residuals) <= 10 < len(usual.residuals)
    for one, other in zip(few.ridges, usual.ridges, strict=True):
        np.testing.assert_array_equal(one, other)
    wide = np.zeros((120, 1025))
    with pytest.raises(InputError, match=r"1,024 steps of 1,025 series .* at most 1,048,576") as no:
        RidgeForecaster.fit(wide, phases, horizon=1024, season=24)
    assert "--columns" in str(no.value.hint)
