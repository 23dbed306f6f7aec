"""LDM4TS: training, sampling, files and attention backends of the model."""

import json
import warnings

import pytest
import torch

from lowtide import InputError, ModelError, NotFiniteError, UsageError
from lowtide.attention.backends import BACKENDS
from lowtide.models.ldm4ts import LDM4TSModel
from lowtide.models.ldm4ts.latent_sampler import GaussianLatent, ScheduleAngles, sample_latents

SMALL = dict(
    image_size=(32, 24), horizons=(7, 10), look_back=41, variables=3, period=5, width=8, seed=3
)
ALL_OFF = dict(views=False, frequency=False, temporal=False)


def make_paths(count, model, seed=0):
    """Return random walks of unit variance and the look-backs that say which way they go."""
    numbers = torch.Generator().manual_seed(seed)
    config = model.config
    context = torch.randn(count, config.look_back, config.variables, generator=numbers).cumsum(1)
    shape = count, config.horizon, config.variables
    steps = torch.randn(shape, generator=numbers).cumsum(1)
    share, length = torch.arange(1, shape[1] + 1)[:, None] / shape[1], config.look_back - 1
    paths = steps + (context[:, -1:] - context[:, :1]) * share
    return context, paths / (share * shape[1] + length * share.square()).sqrt()


def make_batch(model, count=4, seed=0):
    """Return arguments of `denoising_loss`."""
    numbers = torch.Generator().manual_seed(seed)
    noise = torch.randn(count, *model.latent_shape, generator=numbers)
    time = torch.randint(model.config.diffusion_steps, (count,), generator=numbers)
    return *make_paths(count, model), noise, time


@pytest.fixture(scope="module")
def fitted():
    model = LDM4TSModel(**SMALL)
    model.fit_autoencoder(make_paths(300, model)[1])
    return model.eval()


@pytest.mark.parametrize("parts", [{}, ALL_OFF, {"views": False, "temporal": False}])
def test_training_reaches_every_tensor_and_lowers_the_loss(parts):
    model = LDM4TSModel(**SMALL, **parts)
    model.fit_autoencoder(make_paths(64, model)[1])
    batch = make_batch(model, 8)
    weights = {name: one for name, one in model.named_parameters() if one.requires_grad}
    reached, losses = set(), []
    for _ in range(12):
        loss = model.denoising_loss(*batch)
        gradients = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
        for (name, weight), gradient in zip(weights.items(), gradients, strict=True):
            if gradient is not None and gradient.any():
                reached |= {name} if len(losses) < 3 else set()
                weight.data -= 5e-3 * gradient.sign()
        losses.append(loss.item())
    assert reached == set(weights)
    assert losses[-1] < 0.8 * losses[0]
    assert model.fit_strength(*batch) > 0.5


def test_checkpointing_changes_no_bit_of_a_gradient():
    gradients = []
    for checkpointing in (False, True):
        model = LDM4TSModel(**SMALL, enable_gradient_checkpointing=checkpointing)
        torch.nn.init.ones_(model.unet.conv_out.weight)  # zeros would stop the gradients
        model.denoising_loss(*make_batch(model)).backward()
        gradients.append({name: one.grad for name, one in model.named_parameters()})
    assert gradients[0].keys() == gradients[1].keys()
    for name, one in gradients[0].items():
        assert one is not None and torch.equal(one, gradients[1][name]), name


def test_untrained_samples_have_the_deviation_of_the_paths(fitted):
    paths = make_paths(300, fitted)[1]
    context = make_paths(1, fitted, seed=1)[0][0]
    drawn = fitted.sample_residuals(context, 400, seed=0, steps=4)
    assert drawn.shape == (400, 10, 3)
    assert drawn.std().item() == pytest.approx(1, rel=0.05)
    # Steps move together as they did in the paths.
    together = (drawn[:, :-1] * drawn[:, 1:]).mean().item()
    assert together == pytest.approx((paths[:, :-1] * paths[:, 1:]).mean().item(), abs=0.1)


def test_a_network_that_knows_nothing_of_new_windows_loses_its_strength():
    model = LDM4TSModel(**SMALL)
    model.fit_autoencoder(make_paths(300, model)[1])
    context, paths, noise, time = make_batch(model, 40, seed=1)
    torch.nn.init.normal_(model.unet.conv_out.weight, generator=torch.Generator().manual_seed(0))
    in_training = model.train()(noise, time, context)
    assert model.fit_strength(context, paths, noise, time) < 0.05
    assert torch.equal(model(noise, time, context), in_training)
    assert not torch.equal(model.eval()(noise, time, context), in_training)
    samples = model.sample_residuals(context[0], 200, seed=0, steps=4)
    assert samples.std().item() == pytest.approx(1, rel=0.1)


def test_samples_depend_on_window_seed_and_key_alone(fitted):
    context = make_paths(3, fitted, seed=1)[0]
    few, many = (fitted.sample_residuals(context[0], n, seed=5, key=2) for n in (20, 60))
    assert torch.equal(few, many[:20])
    assert not torch.equal(few, fitted.sample_residuals(context[0], 20, seed=5, key=3))
    assert torch.equal(few, fitted.sample_residuals(context[0].numpy(), 20, seed=5, key=2))
    together = fitted.forecast(context, 5, seed=1)
    assert together.shape == (5, 3, 10, 3)
    assert torch.equal(together[:, 2:], fitted.forecast(context[2:], 5, seed=1))


def test_the_last_step_ends_at_the_latent_whatever_their_number():
    latent = torch.randn(3, 2, 4, 5, generator=torch.Generator().manual_seed(0))
    angles, gaussian = ScheduleAngles(1000), GaussianLatent((2, 4, 5))
    gaussian.fit(torch.randn(200, 2, 4, 5, generator=torch.Generator().manual_seed(1)).cumsum(2))

    def oracle(noisy, time):
        cosine, sine = angles.of(time, noisy)
        return (cosine * noisy - latent) / sine

    for steps in range(1, 21):
        found = sample_latents(torch.randn(latent.shape), oracle, angles, gaussian, steps)
        assert torch.allclose(found, latent, atol=1e-5), steps


def test_gaussian_latents_are_sampled_exactly_in_any_number_of_steps():
    numbers = torch.Generator().manual_seed(0)
    angles, gaussian = ScheduleAngles(1000), GaussianLatent((1, 6, 6))
    mixing = torch.randn(36, 36, generator=numbers) * torch.logspace(0.5, -0.5, 36)
    gaussian.fit((torch.randn(5000, 36, generator=numbers) @ mixing.T).view(-1, 1, 6, 6))
    noise = torch.randn(5000, 1, 6, 6, generator=numbers)

    def velocity(noisy, time):
        return gaussian.velocity(noisy, *angles.of(time, noisy))

    for steps in (2, 10):
        found = sample_latents(noise, velocity, angles, gaussian, steps).flatten(1)
        expected = gaussian.color(noise, torch.ones(()), torch.zeros(())).flatten(1)
        assert torch.allclose(found, expected, atol=0.05)
        ratio = torch.cov(found.T).trace() / (mixing @ mixing.T).trace()
        assert ratio.item() == pytest.approx(1, rel=0.03)
    time = torch.arange(50) * 20
    exact = velocity(noise[:50], time)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(velocity(noise[:50], time), exact)
        assert gaussian.inside(noise[:50].bfloat16()).dtype == torch.float32


def test_packages_that_are_missing_become_fused_sdpa_with_a_note(monkeypatch):
    for name in ("flash", "sage"):
        with pytest.warns(UserWarning, match=f"{name}: .*fused SDPA runs instead"):
            model = LDM4TSModel(**SMALL, attention_backend=name)
        assert len(model.notes) == 1 and model.training
        model.denoising_loss(*make_batch(model)).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not LDM4TSModel(**SMALL, attention_backend="sdpa").notes
    monkeypatch.setattr(type(BACKENDS["sage"]), "missing_requirement", lambda *_: None)
    model = LDM4TSModel(**SMALL, attention_backend="sage")
    assert not model.training
    with pytest.raises(UsageError, match="no backward pass"):
        model.train()
    with pytest.warns(UserWarning, match="the dtype is not fp16 or bf16; fused SDPA"):
        model.forecast(make_batch(model)[0][:1], 1)


def test_saved_models_return_the_same_samples(tmp_path, fitted):
    context = make_paths(1, fitted)[0][0]
    fitted.save(tmp_path / "model")
    for path in (tmp_path / "model", tmp_path / "model" / "ldm4ts.safetensors"):
        loaded = LDM4TSModel.load(path)
        assert loaded.config == fitted.config
        assert torch.equal(
            loaded.sample_residuals(context, 3, seed=0), fitted.sample_residuals(context, 3, seed=0)
        )
    config = tmp_path / "model" / "ldm4ts.json"
    values = json.loads(config.read_text())
    for text, said in [
        (json.dumps({**values, "width": 16}), "do not fit"),
        (json.dumps({**values, "wide": 16}), "wide"),
        ("{", "damaged"),
    ]:
        config.write_text(text)
        with pytest.raises(ModelError, match=said):
            LDM4TSModel.load(tmp_path / "model")
    with pytest.raises(ModelError, match=r"no ldm4ts\.safetensors"):
        LDM4TSModel.load(tmp_path)


def test_wrong_arguments_are_refused_by_name(fitted):
    context = make_paths(2, fitted)[0]
    for wrong, said in [({"image_size": (30, 30)}, "image_size"), ({"depth": 3}, "depth")]:
        with pytest.raises(UsageError, match=said):
            LDM4TSModel(**{**SMALL, **wrong})
    with pytest.raises(UsageError, match=r"\[B, 41, 3\], not \[2, 40, 3\]"):
        fitted.forecast(context[:, 1:], 2)
    with pytest.raises(UsageError, match="1001 steps"):
        fitted.sample_residuals(context[0], 2, seed=0, steps=1001)
    with pytest.raises(InputError, match="not finite"):
        fitted.forecast(context.where(context < 1, torch.nan), 2)
    with pytest.raises(NotFiniteError):
        fitted.sample_residuals(context[0] * torch.nan, 2, seed=0)
    with pytest.raises(UsageError, match="nothing to train"):
        LDM4TSModel(**SMALL, diffusion=False).denoising_loss(*make_batch(fitted))


@pytest.mark.slow
def test_the_model_of_the_guide_trains():
    with pytest.warns(UserWarning, match="flash"):
        model = LDM4TSModel(
            image_size=(224, 224),
            horizons=[15, 60, 240],
            diffusion_steps=1000,
            device="cpu",
            attention_backend="flash",
            enable_gradient_checkpointing=True,
        )
    loss = model.denoising_loss(*make_batch(model, 2))
    loss.backward()
    assert loss.isfinite() and model.unet.conv_out.weight.grad.any()
    assert model.forecast(make_batch(model, 1)[0], 2, steps=2).shape == (2, 1, 240, 1)
    inputs = model.example_inputs(2, (224, 224))
    assert model(*inputs).shape == inputs[0].shape
