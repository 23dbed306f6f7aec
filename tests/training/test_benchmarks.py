"""What the benchmarks of ParagonSR2 and of training compute from what they measured."""

import importlib

import pytest
import torch

from lowtide.attention import functional

# The benchmarks are scripts, not a package.
variants = importlib.import_module("paragonsr2_variants")
runs = importlib.import_module("paragonsr2_runs")
training_memory = importlib.import_module("training_memory")
training_runs = importlib.import_module("training_runs")
attention_helps = importlib.import_module("attention_helps")


def scored(psnr, seconds, resumed=0):
    return {"psnr_y_db": psnr, "cpu_s": seconds, "resumed_at": resumed}


@pytest.fixture
def choices_forgotten():
    """What was chosen for a call is remembered, whatever the processor."""
    functional.resolve_cached.cache_clear()
    yield
    functional.resolve_cached.cache_clear()


def test_the_work_of_a_variant(choices_forgotten):
    figures = variants.size_of("nano", 2)
    assert figures["window"] == {"parameters": 11_890, "flops_per_pixel": 83_526}
    assert figures["none"] == {"parameters": 10_282, "flops_per_pixel": 22_662}


def test_gains_are_those_of_equal_seeds():
    pairs = [(scored(30.2, 4.0), scored(30.0, 2.0)), (scored(30.4, 9.0, 5), scored(30.0, 2.0))]
    found = attention_helps.gained(pairs)
    assert found["gains_db"] == [0.2, 0.4]
    assert (found["seeds"], found["gain_db"]) == (2, 0.3)
    assert found["deviation_db"] == pytest.approx(0.1414, abs=1e-4)
    # An interrupted run was not timed as a whole.
    assert found["cpu_ratio"] == 2.0
    assert attention_helps.gained(pairs[:1])["deviation_db"] is None
    assert attention_helps.gained(pairs[1:])["cpu_ratio"] is None
    elsewhere = scored(30.2, 4.0) | {"environment": {"cpu": "another"}}
    found = attention_helps.gained([(elsewhere, scored(30.0, 2.0))])
    assert (found["gain_db"], found["cpu_ratio"]) == (0.2, None)


def test_percentages_have_their_signs():
    assert training_memory.error_percent(110, 100) == 10.0
    assert training_memory.error_percent(80, 100) == -20.0
    assert training_memory.saved_percent(25, 100) == 75.0
    found = training_memory.compare(
        {
            "none": {"cpu_s": [1.0, 1.0], "activations_bytes": 200},
            "full": {"cpu_s": [1.5, 1.3], "activations_bytes": 50},
        }
    )
    assert found["none"]["saved_percent"] == 0.0
    assert found["full"]["saved_percent"] == 75.0
    assert found["full"]["ratio"] == {"median": 1.4, "min": 1.3, "max": 1.5}


def test_claims_are_judged_by_their_upper_end_and_only_where_there_are_any():
    gib = 2**30
    found = variants.compare_with_claim("nano", gib // 4, gib, (0.2, 0.5))
    assert found["within_claim"] and found["claimed_bytes"][1] == gib // 2
    assert not variants.compare_with_claim("xl", gib, gib, (0.2, 0.5))["within_claim"]
    assert "claimed_bytes" not in variants.compare_with_claim("photo", gib, gib, (0.2, 0.5))


def test_every_network_has_weights_that_leave_no_branch_out():
    for name in runs.NAMES:
        for attention in runs.attentions(name):
            made = runs.network(name, 2, attention) if name in ("nano", "realtime") else None
            with torch.device("meta"):
                shaped = runs.network(name, 2, attention)
            shares = [key for key, _ in shaped.named_parameters() if key.endswith("gamma")]
            assert shares
            if made is not None:
                assert all(bool((made.state_dict()[key] == 0.5).all()) for key in shares)


def test_configurations_are_those_of_the_trainer():
    for title in training_runs.CONFIGURATIONS:
        config = training_runs.config_of(title)
        assert (config.network_d is not None) == ("MUNet" in title)
        assert config.train.checkpointing == ("full" if "full" in title else "none")
        assert config.datasets.train.accum_iter == 1
