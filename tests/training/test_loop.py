"""Training goes on exactly where it was stopped, in parts or at once, and names what goes wrong."""

import contextlib
import json

import pytest
import torch
from torch import nn

from lowtide import BudgetError, Cancelled, NotFiniteError, OutputError, UsageError
from lowtide.training.setup import make_discriminator, make_generator
from lowtide.training.state import load_latest_state
from lowtide.training.tasks.sr_config import SrConfig
from lowtide.training.tasks.super_resolution import make_pairs_task
from lowtide.training.trainer import Trainer

GAN = {
    "network_d": {"type": "munet", "features": 8, "widths": [1, 2], "window": 8, "shared": 2},
    "losses": [
        {"type": "l1loss"},
        {"type": "ganloss", "gan_type": "r3gan", "loss_weight": 0.1, "r1_weight": 1.0},
    ],
}


class Drawn:
    """Batches that are a function of the step."""

    def __init__(self, batch=4, patch=12):
        self.shape, self.calls = (batch, 3, patch), []

    def prefetch(self, first):
        step = first
        while True:
            self.calls.append(step)
            generator = torch.Generator().manual_seed(step)
            batch, channels, patch = self.shape
            high = torch.rand(batch, channels, 2 * patch, 2 * patch, generator=generator)
            yield torch.nn.functional.avg_pool2d(high, 2), high
            step += 1


def config_of(total=8, network_d=None, losses=None, **train):
    return SrConfig.from_values(
        {
            "name": "mine",
            "scale": 2,
            "datasets": {"train": {"dataroot_gt": ["none"]}},
            "network_g": {"type": "paragonsr2_nano", "window": 8, "shared": 2},
            **({"network_d": network_d} if network_d else {}),
            "train": {
                "total_iter": total,
                "optim_g": {"lr": 1e-3},
                "losses": losses or [{"type": "l1loss"}, {"type": "fftloss", "loss_weight": 0.1}],
                **train,
            },
            "logger": {"print_freq": 1, "save_checkpoint_freq": 3},
        }
    )


def trainer(config, folder, **more):
    generator = make_generator(config.network_g, config.scale, config.manual_seed)
    discriminator = None
    if config.network_d:
        discriminator = make_discriminator(config.network_d, config.manual_seed)
    more = {"batches": Drawn(), **more}
    batches = more.pop("batches")
    task = make_pairs_task(config, generator, batches, discriminator)
    return Trainer(config, folder, task, **more)


def log_of(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def weights_of(one):
    return {name: weight.clone() for name, weight in one.ema_network.state_dict().items()}


class KilledError(Exception):
    """As if the process were gone."""


@pytest.mark.parametrize("extra", [{}, GAN], ids=["pixels", "gan"])
@pytest.mark.parametrize("at", [2, 4, 7])
def test_a_killed_run_goes_on_with_the_same_losses(tmp_path, extra, at):
    config = config_of(**extra)
    undisturbed = trainer(config, tmp_path / "a")
    undisturbed.run()

    def kill(moment):
        if moment.step == at:
            raise KilledError

    killed = trainer(config, tmp_path / "b")
    with pytest.raises(KilledError):
        killed.run(on_step=kill)
    again = trainer(config, tmp_path / "b")
    assert again.resume() == at // 3 * 3 if at > 3 else again.completed_steps == 0
    again.run()
    assert log_of(tmp_path / "b") == log_of(tmp_path / "a")
    assert [row["step"] for row in log_of(tmp_path / "b")] == list(range(1, 9))
    for name, weight in weights_of(undisturbed).items():
        assert torch.equal(weight, again.ema_network.state_dict()[name]), name


def test_a_run_that_is_stopped_keeps_its_step(tmp_path):
    config, calls = config_of(), []

    def cancel():
        calls.append(None)
        return len(calls) == 5

    with pytest.raises(Cancelled):
        trainer(config, tmp_path).run(cancel=cancel)
    again = trainer(config, tmp_path)
    assert again.resume() == 5
    again.run()
    whole = trainer(config, tmp_path / "whole")
    whole.run()
    assert log_of(tmp_path) == log_of(tmp_path / "whole")


def test_a_validation_that_fails_loses_no_step(tmp_path):
    class Refused:
        lower_is_better, conditions = False, {}

        def __call__(self, network, step):
            raise BudgetError("no plan fits", hint="--budget 54MiB")

    with pytest.raises(BudgetError) as failed:
        trainer(config_of(total=3), tmp_path).run(Refused())
    assert failed.value.hint.startswith("--budget 54MiB; step 3 is saved")
    state, _ = load_latest_state(tmp_path / "training_states")
    assert state.step == 3


@contextlib.contextmanager
def files_of_at_most(size):
    """As on a full disk: nothing is written beyond ``size`` bytes of a file."""
    resource = pytest.importorskip("resource", reason="limits files as Unix does")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("at", ["a state", "a row of the log"])
def test_a_full_disk_is_named_and_what_is_done_is_kept(tmp_path, at):
    same = {"scheduler": {"type": "constant"}}  # whatever the total is
    config = config_of(**same)
    undisturbed = trainer(config, tmp_path / "a")
    undisturbed.run()
    folder = tmp_path / "b"
    trainer(config_of(total=4, **same), folder).run()
    log = (folder / "log.jsonl").read_bytes()
    # The fifth row is torn, or all of them fit and the state of step 6 does not.
    limit, done = (20_000, 6) if at == "a state" else (len(log) + 10, 5)
    full = trainer(config, folder)
    full.resume()
    with files_of_at_most(limit), pytest.raises(OutputError) as caught:
        full.run()
    assert "the disk is full" in caught.value.message
    assert f"step {done} of 8 is done, and the state of step 4 is saved" in caught.value.message
    assert "free some space" in caught.value.hint
    assert [row["step"] for row in log_of(folder)] == list(range(1, 7 if done == 6 else 5))
    states = folder / "training_states"
    assert sorted(path.name for path in states.iterdir()) == ["3.state", "4.state"]
    again = trainer(config, folder)
    assert again.resume() == 4
    again.run()
    assert (folder / "log.jsonl").read_bytes() == (tmp_path / "a/log.jsonl").read_bytes()
    for name, weight in weights_of(undisturbed).items():
        assert torch.equal(weight, again.ema_network.state_dict()[name]), name


def test_the_best_score_is_of_one_measure(tmp_path):
    """What was best by another one, of other pictures, says nothing."""

    class Scores:
        lower_is_better = False

        def __init__(self, conditions, scores):
            self.conditions, self.scores = {"metric": conditions}, iter(scores)

        def __call__(self, network, step):
            return {"one": next(self.scores)}

    def best_of(total, *given):
        """In which steps the weights were the best."""
        config = config_of(total=total)
        config = config.model_copy(update={"val": config.val.model_copy(update={"val_freq": 1})})
        one = trainer(config, tmp_path)
        one.resume()
        one.run(Scores(*given))
        assert one.best_weights.is_file()
        return [row["step"] for row in log_of(tmp_path) if row.get("best")]

    assert best_of(2, "psnr", [30.0, 29.0]) == [1]
    assert best_of(4, "ssim", [0.9, 0.8]) == [1, 3]
    assert best_of(6, "ssim", [0.85, 0.95]) == [1, 3, 6]


class Scored:
    """Validation whose scores are given by the step."""

    lower_is_better, conditions = True, {"metric": "given"}

    def __init__(self, scores):
        self.scores = scores

    def __call__(self, network, step):
        return {"error": self.scores[step]}


def test_a_run_that_gains_nothing_ends(tmp_path):
    scores = {1: 0.5, 2: 0.4, 3: 0.6, 4: 0.5, 5: 0.7, 6: 0.3, 7: 0.9, 8: 0.9}

    def run(folder, total=8, patience=3):
        config = config_of(total=total, scheduler={"type": "constant"})
        val = config.val.model_copy(update={"val_freq": 1, "patience": patience})
        one = trainer(config.model_copy(update={"val": val}), tmp_path / folder)
        one.resume()
        one.run(Scored(scores))
        return one

    first = run("a")
    assert (first.completed_steps, first.best_score) == (5, 0.4)
    assert first.notes == [
        "stopped after 5 of 8 steps: 3 validations were no better than that after step 2"
    ]
    assert [row["best"] for row in log_of(tmp_path / "a") if "best" in row] == [
        *(True, True, False, False, False)
    ]
    run("b", total=4)  # stopped in between
    again = run("b")
    assert again.completed_steps == 5 and run("b").completed_steps == 5
    for name, weight in weights_of(first).items():
        assert torch.equal(weight, again.ema_network.state_dict()[name]), name
    longer = run("a", patience=4)
    assert (longer.completed_steps, longer.best_score) == (8, 0.3)


def test_a_longer_run_goes_on_and_another_is_refused(tmp_path):
    trainer(config_of(total=4), tmp_path).run()
    longer = trainer(config_of(total=6), tmp_path)
    assert longer.resume() == 4
    longer.run()
    assert longer.completed_steps == 6
    changed = config_of(total=9, ema_decay=0.5).model_copy(update={"manual_seed": 7})
    words = "manual_seed was 0 and is 7, train.ema_decay was .* and is 0.5$"
    with pytest.raises(UsageError, match=words):
        trainer(changed, tmp_path).resume()


def test_a_run_that_is_to_be_shorter_than_it_is_ends(tmp_path):
    first = trainer(config_of(total=4), tmp_path)
    first.run()
    for total in (4, 2):
        batches = Drawn()
        shorter = trainer(config_of(total=total), tmp_path, batches=batches)
        assert shorter.resume() == 4
        said = [text for text in shorter.warnings if "4 steps were done already" in text]
        assert len(said) == (total < 4)
        shorter.run(on_step=lambda _: pytest.fail("a step was taken"))
        assert (shorter.completed_steps, batches.calls) == (4, [])
    for name, weight in weights_of(first).items():
        assert torch.equal(weight, shorter.ema_network.state_dict()[name]), name
    assert [row["step"] for row in log_of(tmp_path)] == [1, 2, 3, 4]


def test_parts_of_a_batch_give_its_gradients(tmp_path):
    runs = [
        trainer(config_of(total=3), tmp_path / str(parts), micro_batches=parts)
        for parts in (1, 2, 4)
    ]
    for run in runs:
        run.run()
    for name, weight in weights_of(runs[0]).items():
        for other in runs[1:]:
            torch.testing.assert_close(
                weight, other.ema_network.state_dict()[name], rtol=0, atol=2e-4
            )
    rows = [log_of(tmp_path / str(parts)) for parts in (1, 2, 4)]
    for one, two, four in zip(*rows, strict=True):
        assert one["l1loss"] == pytest.approx(two["l1loss"], abs=1e-4)
        assert one["l1loss"] == pytest.approx(four["l1loss"], abs=1e-4)


def test_checkpointing_gives_the_same_gradients(tmp_path):
    """Bit for bit, on the CPU."""
    config = config_of(total=3)
    network = {"type": "paragonsr2_m", "groups": 2, "blocks": 2, "window": 8, "shared": 2}
    runs = []
    for how in ("none", "full", "selective"):
        chosen = config.model_copy(
            update={
                "network_g": network,
                "train": config.train.model_copy(update={"checkpointing": how}),
            }
        )
        runs.append(trainer(chosen, tmp_path / how))
        runs[-1].run()
    for name, weight in weights_of(runs[0]).items():
        for other in runs[1:]:
            assert torch.equal(weight, other.ema_network.state_dict()[name]), name


def test_losses_fall(tmp_path):
    class Same(Drawn):
        def prefetch(self, first):
            low, high = next(super().prefetch(0))
            while True:
                yield low, high

    run = trainer(config_of(total=60, optim_g={"lr": 3e-3}), tmp_path, batches=Same())
    run.run()
    rows = log_of(tmp_path)
    assert rows[-1]["l1loss"] < 0.97 * rows[0]["l1loss"]


def test_the_average_lags_behind(tmp_path):
    run = trainer(config_of(total=3, ema_decay=0.9), tmp_path)
    before = weights_of(run)
    run.run()
    after = weights_of(run)
    moved = [not torch.equal(before[name], after[name]) for name in before]
    assert any(moved)


def test_a_loss_that_is_not_finite_is_named(tmp_path, monkeypatch):
    from lowtide.training.tasks import super_resolution

    class Broken(nn.Module):
        def forward(self, made, _):
            return made.mean() * torch.nan

    make = super_resolution.make_loss
    broken = {"fftloss": lambda: Broken()}
    monkeypatch.setattr(
        super_resolution,
        "make_loss",
        lambda kind, **more: broken.get(kind, lambda: make(kind, **more))(),
    )
    with pytest.raises(NotFiniteError, match="the loss fftloss is nan in step 0"):
        trainer(config_of(), tmp_path).run()


def test_weights_that_never_learn_are_named(tmp_path):
    generator = make_generator({"type": "paragonsr2_nano"}, 2, 0)
    generator.unused = nn.Parameter(torch.zeros(2))
    config = config_of()
    run = Trainer(config, tmp_path, make_pairs_task(config, generator, Drawn()))
    with pytest.raises(UsageError, match=r"1 weights of the generator .* unused"):
        run.run()


def test_the_discriminator_learns_too(tmp_path):
    run = trainer(config_of(total=4, **GAN), tmp_path)
    before = {n: w.clone() for n, w in run.task.networks["discriminator"].named_parameters()}
    run.run()
    still = [
        name
        for name, weight in run.task.networks["discriminator"].named_parameters()
        if torch.equal(weight, before[name])
    ]
    assert not still
    names = {"l1loss", "gan", "discriminator", "penalty_real", "penalty_fake"}
    assert all(names <= set(row) for row in log_of(tmp_path))


def test_states_keep_the_names_by_which_those_of_before_resume(tmp_path):
    config = config_of(total=1, **GAN)
    trainer(config, tmp_path).run()
    state, _ = load_latest_state(tmp_path / "training_states")
    networks = ("generator", "discriminator")
    optimizers = {f"{name} optimizer" for name in networks}
    assert set(state.parts) == {"average", *networks, *optimizers}
    top = "name scale manual_seed precision channels_last datasets network_g network_d train val"
    assert set(state.config) == {*top.split(), "logger", "path", "processes"}
    train = "total_iter warmup_iter losses optim_g optim_d scheduler ema_decay ema_warmup grad_clip"
    assert set(state.config["train"]) == {*train.split(), "checkpointing", "compile"}
    data = "dataroot_gt dataroot_lq filename_tmpl degradation lq_size batch_size_per_gpu accum_iter"
    more = "use_hflip use_rot color num_worker_per_gpu skip_broken"
    assert set(state.config["datasets"]["train"]) == {*data.split(), *more.split()}


def test_a_gan_that_begins_later(tmp_path):
    losses = [{"type": "l1loss"}, {"type": "ganloss", "gan_type": "hinge", "start_iter": 3}]
    run = trainer(config_of(total=6, network_d=GAN["network_d"], losses=losses), tmp_path)
    run.run()
    assert ["gan" in row for row in log_of(tmp_path)] == [False] * 3 + [True] * 3


def test_losses_that_cannot_be(tmp_path):
    for changes, words in (
        ({"losses": [{"type": "ganloss"}]}, "require each other"),
        ({"network_d": GAN["network_d"]}, "require each other"),
        ({"losses": [{"type": "l2los"}]}, "l2los"),
        (
            {"network_d": GAN["network_d"], "losses": [{"type": "ganloss", "gan_typ": "hinge"}]},
            "gan_typ is not known",
        ),
        (
            {"network_d": GAN["network_d"], "losses": [{"type": "ganloss", "gan_type": "hing"}]},
            "hing",
        ),
        (
            {"network_d": GAN["network_d"], "losses": [{"type": "ganloss", "r1_weight": -1.0}]},
            "r1_weight must be",
        ),
        (
            {"network_d": GAN["network_d"], "losses": [{"type": "ganloss", "r1_weight": "much"}]},
            "r1_weight must be",
        ),
    ):
        with pytest.raises(UsageError, match=words):
            trainer(config_of(**changes), tmp_path)


def test_bf16_keeps_the_fixed_path_exact(tmp_path):
    config = config_of(total=2).model_copy(update={"precision": "bf16"})
    run = trainer(config, tmp_path)
    seen = []
    base = run.task.networks["generator"].base
    base.register_forward_hook(lambda _module, _given, made: seen.append(made.dtype))
    run.run()
    assert set(seen) == {torch.float32}


def test_curves_for_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = config_of(total=4)
    logger = config.logger.model_copy(update={"use_tb_logger": True})
    trainer(config.model_copy(update={"logger": logger}), tmp_path).run()
    curves = EventAccumulator(str(tmp_path / "tensorboard"))
    curves.Reload()
    points = {point.step: point.value for point in curves.Scalars("l1loss")}
    assert points == pytest.approx({row["step"]: row["l1loss"] for row in log_of(tmp_path)})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler's own
@pytest.mark.parametrize("patch", [8, 10], ids=["as it is", "padded for the discriminator"])
def test_compiled_networks_take_the_same_steps(tmp_path, patch):
    gan = {**GAN, "losses": [GAN["losses"][0], {"type": "ganloss", "loss_weight": 0.1}]}
    for name, options in (("plain", {}), ("compiled", {"compile": True})):
        trainer(
            config_of(total=3, **gan, **options), tmp_path / name, batches=Drawn(2, patch)
        ).run()
    for ours, theirs in zip(log_of(tmp_path / "compiled"), log_of(tmp_path / "plain"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
