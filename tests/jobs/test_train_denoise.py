"""Training of denoisers, and what their weights denoise, as users call them."""

import json
import threading
from pathlib import Path

import numpy as np
import pytest
import yaml

pytest.importorskip("accelerate")

import lowtide
from lowtide import BudgetError, Cancelled, UsageError
from lowtide.cli.main import main
from lowtide.jobs.denoise.train import make_denoise_task, train_denoise
from lowtide.jobs.images.chosen_noise import choose_noise, require_trained_noise
from lowtide.jobs.train.memory import plan_step
from lowtide.models.denoiser.noise_table import NoiseTable
from lowtide.training.distributed import SINGLE_PROCESS
from lowtide.training.tasks.denoise_config import DenoiseConfig

NETWORK = {"features": 8, "multipliers": [1, 2], "groups": 4, "embedding": 16}
SMALL = ("--features", 8, "--multipliers", "1,2", "--groups", 4, "--embedding", 16)
QUICK = ("--patch-size", 16, "--batch-size", 2, "--device", "cpu", "--warmup-iter", 0)


@pytest.fixture(scope="module")
def photos(tmp_path_factory, photo):
    """A folder of color photographs, a gray one and one with alpha, and one to validate on."""
    import pyvips

    folder = tmp_path_factory.mktemp("photos")
    alpha = np.full((120, 90, 1), 128, np.uint8)
    for name, image in {
        "data/left.png": photo[:300, :300],
        "data/deep.png": photo[100:300, 300:501].astype(np.uint16) * 257,
        "data/more/gray.png": photo[:120, 400:500, :1],
        "data/alpha.png": np.concatenate([photo[200:320, 300:390], alpha], 2),
        "val/cup.png": photo[150:191, 250:309],
        "val/gray.png": photo[100:137, 200:231, :1],
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        made = pyvips.Image.new_from_array(image)
        if image.dtype == np.uint16:
            made = made.copy(interpretation="rgb16")
        made.pngsave(str(folder / name))
    return folder


@pytest.fixture(scope="module")
def camera(tmp_path_factory):
    """A table of a raw camera at two ISOs."""
    path = tmp_path_factory.mktemp("camera") / "camera.json"
    terms = {"row": 1.5, "tukey_lambda": None, "black": 512, "white": 16383}
    settings = [
        {"iso": iso, "parameters": {"gain": iso / 400, "read": 4 + iso / 400, **terms}}
        for iso in (800, 6400)
    ]
    values = {"camera": "A1", "noise_model": "raw-camera", "settings": settings}
    NoiseTable.model_validate(values).save(path)
    return path


def config_of(photos, *, data=None, network=None, train=None, val=None, name="small"):
    values = {
        "name": name,
        "datasets": {
            "train": {
                "dataroot_gt": [str(photos / "data")],
                "patch_size": 16,
                "batch_size_per_gpu": 2,
                **(data or {}),
            },
            "val": {"dataroot_gt": [str(photos / "val")]} if val is not None else None,
        },
        "network": {**NETWORK, **(network or {})},
        "train": {"total_iter": 4, "warmup_iter": 0, **(train or {})},
        "val": val or {},
        "logger": {"print_freq": 1},
    }
    return DenoiseConfig.from_values(values)


def run(*words):
    """Run a command line as a shell does, with ``_`` in options as well as ``-``."""
    import contextlib
    import io

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(word) for word in words])
            code = 0
        except SystemExit as stopped:
            code = stopped.code
    return code, out.getvalue(), err.getvalue()


def rows_of(report):
    text = (Path(report.folder) / "log.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_training_lowers_the_loss_and_whole_photographs_are_scored(photos, tmp_path):
    data = {"patch_size": 32, "batch_size_per_gpu": 4, "sigma": [20, 60]}
    train = {"total_iter": 80, "optim": {"lr": 4e-3}}
    config = config_of(photos, data=data, train=train, val={"val_freq": 80})
    report = train_denoise(config, tmp_path, device="cpu")
    rows = rows_of(report)
    losses = [row["denoising"] for row in rows if "denoising" in row]
    assert np.mean(losses[-15:]) < 0.75 * np.mean(losses[:5])
    assert [row["step"] for row in rows if "psnr" in row] == [80]
    assert set(report.scores) == {"psnr", "psnr_sigma30", "psnr_sigma40", "psnr_sigma60"}
    assert report.scores["psnr_sigma30"] > report.scores["psnr_sigma60"]
    # Its noisy files have 14 dB.
    assert report.scores["psnr_sigma60"] > 16
    assert Path(report.best_weights).read_bytes() == Path(report.weights).read_bytes()


@pytest.mark.slow
def test_weights_of_a_run_denoise_a_photograph(photos, tmp_path, save, read, photo):
    report = train_denoise(config_of(photos, train={"total_iter": 100}), tmp_path, device="cpu")
    noisy = photo[:60, :71] + np.random.default_rng(0).normal(0, 50, (60, 71, 3))
    source = save(tmp_path / "in.png", np.rint(noisy.clip(0, 255)).astype(np.uint8))
    lowtide.denoise(source, tmp_path / "out.png", model=report.weights, sigma=50)
    errors = [
        np.square(read(one) - photo[:60, :71].astype(float)).mean()
        for one in (source, tmp_path / "out.png")
    ]
    assert errors[1] < 0.6 * errors[0]


def test_a_stopped_run_goes_on_as_if_it_never_was(photos, camera, tmp_path):
    """Byte for byte, with a noise table and whatever the split of the batch."""
    config = config_of(photos, data={"noise": str(camera)})
    stop = threading.Event()

    def stop_after_two(event):
        if event.step == 2:
            stop.set()

    whole = train_denoise(config, tmp_path / "whole", device="cpu")
    with pytest.raises(Cancelled):
        train_denoise(config, tmp_path / "parts", device="cpu", on_step=stop_after_two, cancel=stop)
    parts = train_denoise(config, tmp_path / "parts", device="cpu")
    assert (parts.resumed_step, parts.steps) == (2, 4)
    assert Path(parts.weights).read_bytes() == Path(whole.weights).read_bytes()
    # Another table is another training, though its file has the same size.
    before = camera.read_text()
    camera.write_text(before.replace('"camera": "A1"', '"camera": "B2"'))
    with pytest.raises(UsageError, match=r"on other files: 1 new .*, 1 removed"):
        train_denoise(config, tmp_path / "parts", device="cpu")
    camera.write_text(before)
    split = config_of(photos, data={"noise": str(camera), "accum_iter": 2}, name="split")
    losses = [row["denoising"] for row in rows_of(whole) if "denoising" in row]
    again = [row["denoising"] for row in rows_of(train_denoise(split, tmp_path, device="cpu"))]
    assert again == pytest.approx(losses, rel=1e-4)


SEED = {
    "linear": ("--sd_attn_type linear --sd_scheduler ddim --use_gradient_checkpointing", 8),
    "channel": ("--sd_attn_type channel --use_gradient_checkpointing", 16),
    "flash": ("--sd_attn_type flash", 8),
}


@pytest.mark.parametrize("attention", SEED)
def test_the_options_of_the_first_denoiser(attention, photos, tmp_path):
    """Its three command lines as they were, with data in the place of their dots."""
    words, batch = SEED[attention]
    # Squeeze-and-excitation has a sixteenth of the channels inside.
    more = ("--features", 16, "--multipliers", "1,2", "--patch-size", 16, "--device", "cpu")
    code, out, err = run(
        *("train", "denoise", photos / "data", *words.split(), "--batch_size", batch),
        *(*more, "--total_iter", 4, "-o", tmp_path),
    )
    assert code == 0, err
    config = json.loads((tmp_path / "data-denoise" / "config.json").read_text())
    assert config["network"]["attention"] == attention
    assert config["datasets"]["train"]["batch_size_per_gpu"] == batch
    kept = "full" if "checkpointing" in words else "none"
    assert config["train"]["checkpointing"] == kept and f"{batch} patches of 16 px" in err
    module = lowtide.load(tmp_path / "data-denoise" / "data-denoise.safetensors").module
    assert (module.config.attention, module.config.scheduler) == (attention, "ddim")
    try:
        import flash_attn  # noqa: F401
    except ImportError:
        assert ("fused SDPA ran instead" in out) == (attention == "flash")


def test_options_change_what_they_name(photos, tmp_path):
    code, _, err = run(
        *("train", "denoise", photos / "data", *SMALL, *QUICK, "--sd_scheduler", "ddpm"),
        *("--total-iter", 4, "-o", tmp_path, "--name", "ddpm", "--attention-levels", "-1,0"),
    )
    assert code == 0, err
    made = lowtide.load(tmp_path / "ddpm" / "ddpm.safetensors").module.config
    assert made.scheduler == "ddpm" and made.attention_levels == (-1, 0)
    peaks = []
    for kept in ("none", "full"):
        config = config_of(photos, data={"patch_size": 88}, train={"checkpointing": kept})
        task = make_denoise_task(config, SINGLE_PROCESS)
        peaks.append(plan_step(config, task, 1 << 40, "cpu").predicted_bytes)
    assert peaks[1] < 0.85 * peaks[0]


@pytest.mark.parametrize("noise", ["gaussian", "poisson-gaussian", "camera", "mosaic"])
def test_weights_name_the_noise_that_they_were_trained_with(noise, photos, camera, tmp_path):
    """Every weight gets a gradient, or the training ends."""
    data = {"noise": str(camera) if noise in ("camera", "mosaic") else noise}
    network = {"prediction": "sample"} if noise == "gaussian" else {}
    if noise == "mosaic":
        data, network = {**data, "cfa": "GRBG"}, {"channels": 1}
    report = train_denoise(config_of(photos, data=data, network=network), tmp_path, device="cpu")
    config = lowtide.load(report.weights).module.config
    if noise in ("camera", "mosaic"):
        table = choose_noise(camera).table
        assert (config.noise_model, config.noise_parameters) == ("raw-camera", 3)
        assert (config.camera, config.noise_sha256) == ("A1", table.sha256)
        assert config.linear and config.cfa == data.get("cfa", "")
        assert config.max_sigma == table.at(6400).level
        require_trained_noise(choose_noise(camera, 1600), config, "it")
        with pytest.raises(UsageError, match="needs it"):
            require_trained_noise(None, config, "it")
    else:
        assert config.noise_model == noise and not config.noise_sha256 and not config.linear
        assert config.max_sigma == pytest.approx(60 / 255)
        require_trained_noise(choose_noise(noise), config, "it")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--patch-size", 18), "--patch-size 16"),
        (("--patch-size", 128), "is smaller than a patch of 128 x 128"),
        (("--noise", "rician"), "known by a table only"),
        (("--noise", "missing.json"), "is no file"),
        (("--sigma", "0,0"), "sigma has to rise"),
        (("--cfa", "RGGB"), "network.channels has to be 1"),
        (("--features", 9), "groups do not divide"),
        (("--features", 10**9), "network: a network of these sizes takes more than"),
        (("--lr", "1e10"), "--lr"),
        (("--batch-siz", 4), "--batch-size"),
    ],
)
def test_what_cannot_be_trained(words, says, photos, tmp_path):
    more = ("--total-iter", 4, "-o", tmp_path / "runs")
    code, _, err = run("train", "denoise", photos / "data", *SMALL, *QUICK, *words, *more)
    assert code == 2 and says in err, err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("batch", [10**9, 2**31 - 1])
def test_a_batch_that_no_memory_holds_is_refused_before_any_plan(batch, photos, tmp_path):
    config = config_of(photos, data={"batch_size_per_gpu": batch})
    with pytest.raises(BudgetError, match=f"{batch:,} patches of 16 px alone take"):
        train_denoise(config, tmp_path / "runs", device="cpu")


def test_a_large_batch_is_run_in_the_fewest_parts_that_fit(photos):
    config = config_of(photos, data={"batch_size_per_gpu": 720_720})
    task = make_denoise_task(config, SINGLE_PROCESS)
    whole = plan_step(config, task, 1 << 60, "cpu")
    assert whole.micro_batches == 1
    parts = plan_step(config, task, whole.upper_bytes // 4, "cpu")
    assert parts.upper_bytes <= whole.upper_bytes // 4 and 720_720 % parts.micro_batches == 0
    accumulated = {"batch_size_per_gpu": 720_720, "accum_iter": parts.micro_batches // 2}
    fewer = config_of(photos, data=accumulated)
    with pytest.raises(BudgetError):
        plan_step(fewer, task, whole.upper_bytes // 4, "cpu")


def test_the_example_is_a_configuration():
    code, out, _ = run("train", "denoise", "--example")
    assert code == 0
    assert DenoiseConfig.from_values(yaml.safe_load(out)).network.attention == "linear"
