"""Damaged tables through `lowtide forecast`: a forecast that is whole, or a refusal by name."""

import io
import warnings

import numpy as np
import pytest
from typer.testing import CliRunner

pd = pytest.importorskip("pandas")

from lowtide.cli.main import app  # noqa: E402

PIECES = b',|"|\n|\0|;|9999-12-31|1e400|1e150|nan|\xff|-|.|\xef\xbb\xbf|\t|1,234|True|,,,'.split(
    b"|"
)


def whole(draw):
    """A table that can be read: wide or long, hourly, daily or monthly."""
    frequency, series = draw.choice(["h", "D", "MS"]), int(draw.integers(1, 4))
    stamps = pd.date_range("2026-01-01", periods=int(draw.integers(2, 90)), freq=frequency)
    values = draw.normal(size=(len(stamps), series)).cumsum(axis=0)
    values[draw.random(values.shape) < draw.choice([0, 0, 0.3, 0.97])] = np.nan
    wide = pd.DataFrame(values, columns=list("abc")[:series]).assign(date=stamps)
    if draw.integers(2):
        return wide[["date", *list("abc")[:series]]]
    long = wide.melt("date", var_name="unique_id", value_name="y").rename(columns={"date": "ds"})
    return long.sample(frac=1, random_state=1) if draw.integers(2) else long


def damaged(seed):
    """Bytes of a table after some damage, by seed: lines, bytes, columns and ends."""
    draw = np.random.default_rng(seed)
    german = dict(sep=";", decimal=",") if draw.integers(4) == 0 else {}
    lines = whole(draw).to_csv(index=bool(draw.integers(2)), **german).encode().splitlines(True)
    for _ in range(draw.integers(3)):
        one, other = draw.integers(len(lines), size=2)
        kind = draw.integers(3)
        if kind == 0:
            lines[one], lines[other] = lines[other], lines[one]
        elif kind == 1:
            lines.insert(one, lines[other])
        else:
            del lines[one]
        lines = lines or [b"\n"]
    data = bytearray(b"".join(lines))
    for _ in range(draw.integers(3)):
        place = int(draw.integers(len(data) + 1))
        data[place : place + int(draw.integers(3))] = PIECES[draw.integers(len(PIECES))]
    return bytes(data[: draw.integers(len(data) + 1)] if draw.integers(8) == 0 else data)


def forecast(path, seed):
    horizon = int(np.random.default_rng(seed).choice([1, 3, 9]))
    words = ["forecast", str(path), "--horizon", str(horizon), "--samples", "20"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        done = CliRunner().invoke(app, words)
    assert done.exit_code in (0, 2), (done.output, done.exception)
    if done.exit_code:
        assert done.stdout == "" and "error: " in done.stderr, done.output
        return False
    frame = pd.read_csv(io.StringIO(done.stdout), parse_dates=["ds"])
    numbers = frame[["mean", "0.1", "0.5", "0.9"]].to_numpy()
    assert np.isfinite(numbers).all()
    assert (np.diff(numbers[:, 1:], axis=1) >= 0).all()
    assert (frame.groupby("unique_id").size() == horizon).all()
    assert (frame.groupby("unique_id")["ds"].nunique() == horizon).all()
    return True


@pytest.mark.parametrize(
    "seeds", [range(20), pytest.param(range(20, 240), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_a_damaged_table_is_forecast_or_refused(tmp_path, seeds):
    path, made = tmp_path / "damaged.csv", 0
    for seed in seeds:
        path.write_bytes(damaged(seed))
        made += forecast(path, seed)
    assert 0.1 * len(seeds) < made < 0.9 * len(seeds)
