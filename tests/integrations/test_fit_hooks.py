"""What others put around a module's forward, before `fit` and after it: compiled calls, hooks."""

import pytest
import torch
from accelerate import cpu_offload, cpu_offload_with_hook
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

import lowtide
from lowtide import ModelError, UsageError
from support.tiny_autoencoders import decoded, encoded, latents, same, small_vae


class Counted(ModelHook):
    """Of accelerate's kind, which replace ``forward``."""

    calls = 0

    def pre_forward(self, module, *args, **kwargs):
        self.calls += 1
        return args, kwargs


def compiled(call):
    return torch.compile(call, backend="eager")


def fitted(vae=None):
    return lowtide.fit(small_vae() if vae is None else vae, budget="64MiB", pages="memory")


def compile_part(vae):
    vae.decoder = compiled(vae.decoder)


def compile_in_place(vae):
    vae.decoder.compile(backend="eager")


def compile_inside(vae):
    vae.decoder.mid_block.compile(backend="eager")


@pytest.mark.parametrize("put", [compile_part, compile_in_place, compile_inside])
def test_compiled_parts_are_refused_and_kept(put):
    vae = small_vae()
    put(vae)
    with pytest.raises(UsageError, match="is compiled"):
        fitted(vae)
    lowtide.unfit(vae)
    assert torch.equal(decoded(vae), decoded(small_vae()))


def test_a_decoding_call_is_compiled_round_it():
    vae = fitted()
    vae.decode = compiled(vae.decode)
    for _ in range(2):
        assert same(decoded(vae), decoded(small_vae()))
    lowtide.unfit(vae)
    assert torch.equal(decoded(vae), decoded(small_vae()))


@pytest.mark.grid(2)
@pytest.mark.parametrize("first", [True, False])
def test_all_of_it_is_compiled(first):
    vae = fitted(compiled(small_vae())) if first else compiled(fitted())
    sample = torch.randn(1, 3, 24, 20)
    with torch.no_grad():
        wanted = small_vae()(sample).sample
        assert same(vae(sample).sample, wanted)
        lowtide.unfit(vae)
        assert torch.equal(vae(sample).sample, wanted)


@pytest.mark.parametrize("put", [compile_part, compile_in_place])
def test_parts_are_compiled_once_they_are_fitted(put):
    vae = fitted()
    put(vae)
    assert same(decoded(vae), decoded(small_vae()))
    lowtide.unfit(vae)
    assert torch.equal(decoded(vae), decoded(small_vae()))


def export(part, image):
    torch.export.export(part, (image,), strict=False)


def trace(part, image):
    torch.jit.trace(part, (image,))


def estimate(part, image):
    lowtide.estimate(part, lowtide.InferenceStep(image))


def stream(part, image):
    lowtide.stream(part, budget="64MiB")(image)


@pytest.mark.filterwarnings("ignore:`torch.jit.:FutureWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.:DeprecationWarning")
@pytest.mark.parametrize("recorded", [export, trace, estimate, stream])
def test_it_is_not_traced(recorded):
    with torch.no_grad(), pytest.raises(ModelError, match="cannot be traced") as caught:
        recorded(fitted().decoder, latents())
    assert "lowtide.unfit" in caught.value.hint


def test_a_hook_on_a_part_is_named_and_kept():
    vae, hook = small_vae(), Counted()
    add_hook_to_module(vae.decoder, hook)
    with pytest.raises(UsageError, match=r"hooks of accelerate \(Counted\)"):
        fitted(vae)
    lowtide.unfit(vae)
    decoded(vae)
    assert hook.calls == 1


def test_a_replaced_forward_is_named_and_kept():
    vae = small_vae()
    vae.decoder.forward = lambda sample: sample
    with pytest.raises(
        UsageError, match="forward of the decoder of this AutoencoderKL is replaced"
    ):
        fitted(vae)
    lowtide.unfit(vae)
    with torch.no_grad():
        assert vae.decoder(torch.ones(1)) == 1


def test_a_hook_that_comes_later_runs_and_outlives_it():
    vae, hook = fitted(), Counted()
    add_hook_to_module(vae.decoder, hook)
    assert same(decoded(vae), decoded(small_vae()))
    assert hook.calls == 1
    lowtide.unfit(vae)
    assert torch.equal(decoded(vae), decoded(small_vae()))
    assert hook.calls == 2
    remove_hook_from_module(vae.decoder)
    assert torch.equal(decoded(vae), decoded(small_vae()))


def test_it_is_fitted_after_a_hook_is_gone():
    vae = small_vae()
    add_hook_to_module(vae.decoder, Counted())
    remove_hook_from_module(vae.decoder)
    decoder, calls = vae.decoder, []
    fitted(vae)
    decoder.register_forward_hook(lambda *_: calls.append(1))
    assert same(decoded(vae), decoded(small_vae()))
    assert calls
    with pytest.raises(UsageError, match="fitted already"):
        fitted(vae)
    lowtide.unfit(vae)
    assert torch.equal(decoded(vae), decoded(small_vae()))


def test_a_class_that_was_replaced_again_is_kept():
    """As FSDP does."""
    vae = fitted()
    sharded = type("Sharded", (type(vae.decoder),), {})
    vae.decoder.__class__ = sharded
    assert same(decoded(vae), decoded(small_vae()))
    with pytest.raises(UsageError, match=r"replaced again after it was fitted, by .*Sharded"):
        lowtide.unfit(vae)
    assert type(vae.decoder) is sharded


def offload_each_layer(vae):
    cpu_offload(vae, torch.device("cpu"), offload_buffers=True)


def cast_each_layer(vae):
    vae.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)


def offload_in_groups(vae):
    vae.enable_group_offload(torch.device("cpu"), torch.device("cpu"), offload_type="leaf_level")


@pytest.mark.parametrize("put", [offload_each_layer, cast_each_layer, offload_in_groups])
def test_hooks_inside_are_refused_at_once(put):
    untouched = small_vae()
    put(untouched)
    wanted = decoded(untouched)
    with pytest.raises(UsageError, match="hooks of"):
        fitted(untouched)
    vae = fitted()
    put(vae)
    for call in (decoded, encoded):
        with pytest.raises(UsageError, match="hooks of"):
            call(vae)
    lowtide.unfit(vae)
    assert torch.equal(decoded(vae), wanted)


def test_it_is_fitted_once_offloading_is_gone_as_the_hint_says():
    vae = small_vae()
    offload_each_layer(vae)
    with pytest.raises(UsageError) as caught:
        fitted(vae)
    assert "remove_hook_from_module(vae, recurse=True)" in caught.value.hint
    remove_hook_from_module(vae, recurse=True)
    assert same(decoded(fitted(vae)), decoded(small_vae()))


@pytest.mark.parametrize("first", [True, False])
def test_an_autoencoder_is_offloaded_as_a_whole(first):
    vae = small_vae()
    if first:
        fitted(vae)
    vae, _ = cpu_offload_with_hook(vae, "cpu")
    if not first:
        fitted(vae)
    assert same(decoded(vae), decoded(small_vae()))
    assert same(encoded(vae), encoded(small_vae()))


def test_weights_without_numbers_are_refused():
    with pytest.raises(UsageError, match="on the meta device"):
        fitted(small_vae().to("meta"))


def test_tiling_and_slicing_are_on_again():
    vae = small_vae(sample_size=8)
    vae.enable_tiling()
    vae.enable_slicing()
    wanted = decoded(vae)
    fitted(vae)
    assert same(decoded(vae), decoded(small_vae()))
    lowtide.unfit(vae)
    assert vae.use_tiling and vae.use_slicing
    assert torch.equal(decoded(vae), wanted)
    assert not same(wanted, decoded(small_vae()))
    vae.disable_tiling()
    lowtide.unfit(fitted(vae))
    assert vae.use_slicing and not vae.use_tiling
