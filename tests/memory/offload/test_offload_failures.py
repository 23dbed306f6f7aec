"""What goes wrong while weights are streamed, and what is left then."""

import os

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from lowtide.core.errors import ModelError, OutputError, UsageError
from lowtide.memory.offload.stream import stream_from_file, stream_weights
from support.offloaded_models import Chosen, Convolutions, Stack, Tied, build, inputs, state_of
from support.offloaded_weights import plan_all, run, same


def test_gradients_are_refused(layers):
    model, _ = layers
    with pytest.raises(UsageError, match="no gradients"):
        model(inputs())
    with torch.no_grad():
        assert same(model(inputs()), run(build(Chosen)))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_failure_in_a_block_leaves_the_others_usable(error, in_flight):
    model, expected = build(Stack), run(build(Stack))
    forward = model.layers[3].forward

    def fail(x):
        forward(x)
        raise error("in the middle")

    with stream_weights(model, plan_all(model, in_flight=in_flight)):
        for _ in range(4):
            model.layers[3].forward = fail
            with pytest.raises(error, match="in the middle"):
                run(model)
            model.layers[3].forward = forward
            assert same(run(model), expected)
    assert same(run(model), expected)


def test_a_truncated_file_is_named_and_can_be_restored(tmp_path):
    path = tmp_path / "weights.safetensors"
    save_file(build(Stack).state_dict(), path)
    whole, expected = path.read_bytes(), run(build(Stack))
    with torch.device("meta"):
        model = Stack()
    with stream_from_file(model, path, plan_all(model)):
        assert same(run(model), expected)
        os.truncate(path, len(whole) // 2)
        with pytest.raises(ModelError, match=r"weights\.safetensors ends in the middle"):
            run(model, 2)
        path.write_bytes(whole)
        assert same(run(model), expected)


def test_a_failed_load_is_tried_again(tmp_path):
    path = tmp_path / "weights.safetensors"
    save_file(build(Stack).state_dict(), path)
    whole, x, resident = path.read_bytes(), torch.ones(1, 32), build(Stack)
    with torch.device("meta"):
        model = Stack()
    with stream_from_file(model, path, plan_all(model)), torch.inference_mode():
        os.truncate(path, 2000)
        for _ in range(3):
            with pytest.raises(ModelError, match="ends in the middle"):
                model.layers[7](x)
        path.write_bytes(whole)
        assert same(model.layers[7](x), resident.layers[7](x))


def test_parts_may_fail_too_and_be_called_alone():
    model, resident, x = build(Stack), build(Stack), torch.ones(1, 32)
    with stream_weights(model, plan_all(model, in_flight=1)), torch.inference_mode():
        for layer in model.layers:
            with pytest.raises(RuntimeError, match="shape"):
                layer(torch.ones(1, 3))
        assert same(model.layers[7](x), resident.layers[7](x))


def test_weights_read_from_outside_are_named():
    class Borrower(Stack):
        def forward(self, x):
            return super().forward(x) + self.layers[2].up.bias[:8]

    model, expected = build(Borrower), run(build(Borrower))
    with (
        stream_weights(model, plan_all(model)),
        pytest.raises(ModelError, match=r"layers\.2\.up\.bias was used") as caught,
    ):
        run(model)
    assert "resident=['layers.2.up.bias']" in str(caught.value.hint)
    with stream_weights(model, plan_all(model, resident=["layers.2.up.bias"])):
        assert same(run(model, 2), expected)


def test_absent_weights_have_a_form_but_no_values(layers):
    model, _ = layers
    weight = model.layers[5].up.weight
    assert weight.shape == (64, 32)
    assert weight.dtype == torch.float32
    assert weight.device == torch.device("cpu")
    assert not weight.is_meta
    assert sum(p.numel() for p in model.parameters()) == sum(
        p.numel() for p in build(Chosen).parameters()
    )
    assert "layers.5.up.weight" in repr(weight)
    for use in (lambda: weight + 1, lambda: weight.data, model.state_dict, weight.tolist):
        with pytest.raises(ModelError, match="was used while its block was not running"):
            use()


def test_buffers_that_change_are_refused_unless_resident():
    model, plain = build(Convolutions).train(), build(Convolutions).train()
    expected = [run(plain), run(plain)]
    with (
        stream_weights(model, plan_all(model)),
        pytest.raises(ModelError, match="changes its own weights or buffers") as caught,
    ):
        run(model)
    assert "resident" in str(caught.value.hint)
    model = build(Convolutions).train()
    with stream_weights(model, plan_all(model, resident=["1"])):
        assert [run(model).tolist(), run(model).tolist()] == [x.tolist() for x in expected]
    assert state_of(model) == state_of(plain)


def test_a_block_inside_another_needs_a_slot_of_its_own():
    class Nested(Stack):
        def __init__(self):
            super().__init__()
            norm = self.layers[2].norm.forward
            self.layers[2].norm.forward = lambda x: norm(self.layers[5](x))

    expected = run(build(Nested))
    model = build(Nested)
    with (
        stream_weights(model, plan_all(model, in_flight=1)),
        pytest.raises(ModelError, match=r"'layers\.5' is called while layers\.2 runs"),
    ):
        run(model)
    with stream_weights(model, plan_all(model)):
        assert same(run(model, 2), expected)


def test_sources_and_plans_that_make_no_sense(tmp_path):
    model = build(Stack)
    plan = plan_all(model)
    with pytest.raises(UsageError, match="as much as resident"):
        stream_weights(model, plan, source="host")
    with pytest.raises(UsageError, match="'cloud'"):
        stream_weights(model, plan, source="cloud")  # pyright: ignore[reportArgumentType]
    with pytest.raises(UsageError, match="streamed to mps"):
        stream_weights(model, plan, device="mps")
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="no CUDA device"):
            stream_weights(model, plan, device="cuda")
    with pytest.raises(UsageError, match="another model"):
        stream_weights(build(Tied), plan)
    with pytest.raises(UsageError, match="no buffer"):
        stream_weights(model, plan.model_copy(update={"in_flight": 0}))
    with pytest.raises(OutputError, match="cannot be written"):
        stream_weights(model, plan, scratch_dir=tmp_path / "missing")
    with torch.device("meta"), pytest.raises(UsageError, match="no weights in memory"):
        stream_weights(Stack(), plan)
    odd = nn.Sequential(nn.Linear(4, 4, dtype=torch.complex128), nn.Linear(4, 4))
    with pytest.raises(ModelError, match="complex128"):
        stream_weights(odd, plan_all(odd), scratch_dir=tmp_path)
    assert not [*tmp_path.iterdir()]
    assert same(run(model), run(build(Stack)))
