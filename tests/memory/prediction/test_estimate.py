"""Estimates: their ledgers, other devices, models that cannot be traced, and bad input."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lowtide import ModelError, UsageError
from lowtide.memory.prediction.estimate import Estimate, estimate
from lowtide.memory.tracing.steps import InferenceStep, TrainingStep
from support.stored_tables import empty_table

MIB = 1 << 20


class Net(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        blocks = [
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.Sequential(nn.SiLU()))
            for _ in range(4)
        ]
        self.first, self.blocks = nn.Conv2d(3, width, 3, padding=1), nn.ModuleList(blocks)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return x


class Attending(nn.Module):
    def forward(self, x):
        tokens = x.flatten(2).transpose(1, 2).unsqueeze(1).contiguous()
        return F.scaled_dot_product_attention(tokens, tokens, tokens)


class Branching(nn.Module):
    """Looks at its values, which fake tensors do not have."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1)

    def forward(self, x):
        x = self.conv(x)
        return x * 2 if float(x.mean()) > 0 else x


def say(model: nn.Module, step, device: str = "cpu", **more) -> Estimate:
    return estimate(model, step, device=device, operators=empty_table(), **more)


IMAGE = (torch.empty(1, 3, 128, 128, device="meta"),)


def test_the_ledger_adds_up_and_says_where_it_comes_from() -> None:
    predicted = say(Net(), TrainingStep(IMAGE))
    assert predicted.method == "traced"
    assert predicted.predicted_bytes == sum(row.value for row in predicted.ledger)
    assert predicted.upper_bytes >= predicted.predicted_bytes >= predicted.live_bytes
    origins = {row.name: row.origin for row in predicted.ledger}
    assert origins["weights"] == origins["live activations"] == "traced"
    assert origins["workspace"] == "probed"
    assert predicted.phase in ("forward", "backward")
    again = Estimate.model_validate_json(predicted.model_dump_json())
    assert again.model_dump() == predicted.model_dump()


def test_orderings() -> None:
    model = Net()
    step = TrainingStep(IMAGE)
    whole = say(model, step).predicted_bytes
    assert say(model, TrainingStep(IMAGE, checkpointing="full")).predicted_bytes < whole
    assert say(model, step, dtype=torch.bfloat16).predicted_bytes < whole
    assert say(model, InferenceStep(IMAGE)).predicted_bytes < whole
    larger = (torch.empty(1, 3, 160, 160, device="meta"),)
    assert say(model, TrainingStep(larger)).predicted_bytes > whole


def test_an_absent_gpu_has_a_context_and_an_allocator() -> None:
    predicted = say(Net(), InferenceStep(IMAGE), "rtx3060-12gb")
    rows = {row.name: row for row in predicted.ledger}
    assert rows["context"].value > 100 * MIB
    assert rows["allocator"].origin == "simulated"
    assert predicted.device == "rtx3060-12gb"


def test_products_keep_a_workspace_in_each_thread_that_makes_them() -> None:
    """Autograd runs backward passes on a GPU in a thread of its own."""
    tokens = (torch.empty(4, 64, device="meta"),)
    layers, size = nn.Linear(64, 64), 32 * MIB
    for step, count in ((InferenceStep(tokens), 1), (TrainingStep(tokens), 2)):
        rows = {row.name: row for row in say(layers, step, "h200").ledger}
        assert count * size <= rows["workspace"].value < count * size + MIB


def test_attention_is_that_of_the_device() -> None:
    image = (torch.empty(1, 8, 64, 64, device="meta"),)
    fused = say(Attending(), InferenceStep(image), "rtx4090", dtype=torch.bfloat16)
    scores = 4096 * 4096 * 2
    assert fused.live_bytes < scores
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        plain = say(Attending(), InferenceStep(image), "rtx4090", dtype=torch.bfloat16)
    assert plain.live_bytes > scores


def test_a_model_that_looks_at_its_values_is_run_small_instead() -> None:
    image = (torch.rand(1, 3, 256, 256),)
    predicted = say(Branching(), InferenceStep(image), heap="trim")
    assert predicted.method == "probed"
    assert "could not be traced" in predicted.notes[0]
    assert {row.origin for row in predicted.ledger} == {"known", "probed"}
    # Two maps of 16 channels, and the scratch of the convolution.
    assert predicted.predicted_bytes == pytest.approx(2 * 16 * 256 * 256 * 4, rel=0.4)


def test_one_that_cannot_run_at_all_says_both_reasons() -> None:
    with pytest.raises(ModelError, match=r"tracing failed .* failed too"):
        say(Net(), InferenceStep((torch.empty(1, 5, 64, 64, device="meta"),)))


def test_one_on_meta_that_cannot_be_traced_cannot_be_run() -> None:
    with torch.device("meta"):
        model = Branching()
    with pytest.raises(ModelError, match="meta device cannot be run"):
        say(model, InferenceStep((torch.rand(1, 3, 64, 64),)))


def test_a_tensor_is_no_step() -> None:
    with pytest.raises(UsageError, match="a step is no Tensor") as refused:
        estimate(nn.Linear(2, 2), torch.rand(1, 2))  # type: ignore[arg-type]
    assert "InferenceStep" in refused.value.hint


def test_an_unknown_device_is_named_with_those_there_are() -> None:
    with pytest.raises(UsageError, match="rtx3060-12gb"):
        say(Net(), InferenceStep(IMAGE), "rtx9999")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer": "lion"}, "optimizer 'lion' is not known"),
        ({"accumulate": 0}, "accumulate must be at least 1, not 0"),
        ({"checkpointing": "some"}, "checkpointing 'some' is not known"),
    ],
)
def test_steps_that_cannot_be(changes, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        say(Net(), TrainingStep(IMAGE, **changes))


def test_a_model_without_weights_cannot_train() -> None:
    with pytest.raises(UsageError, match="no weights to train"):
        say(Attending(), TrainingStep((torch.empty(1, 8, 16, 16, device="meta"),)))


def test_selective_checkpointing_of_what_changes_in_place_is_refused() -> None:
    model = nn.Sequential(
        *[
            layer
            for _ in range(4)
            for layer in (nn.Conv2d(3, 3, 3), nn.LeakyReLU(0.1, inplace=True))
        ]
    )
    with pytest.raises(UsageError, match="changes in place"):
        say(model, TrainingStep(IMAGE, checkpointing="selective"))


def test_empty_tensors_are_no_obstacle() -> None:
    class Empties(nn.Module):
        def forward(self, x):
            nothing = x[:, :0].clone()
            x = x * 2
            del nothing
            return torch.cat([x, x[:, :0].clone()], 1)

    assert say(Empties(), InferenceStep(IMAGE)).method == "traced"
