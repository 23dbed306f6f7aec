"""What is shipped, traced or timed in passing, rather than measured before the first pixel."""

import json
import zlib

import numpy as np
import pytest
import torch
from PIL import Image
from spandrel.architectures.ESRGAN import ESRGAN

import lowtide
from lowtide.core import heap
from lowtide.core.units import MIB
from lowtide.jobs.denoise.settings import DenoiseSettings
from lowtide.jobs.images import job as image_job
from lowtide.jobs.images import model_costs, run_clock
from lowtide.jobs.images.build_network import build_network, network_weight_bytes
from lowtide.jobs.images.model_costs import store_costs, stored_costs
from lowtide.jobs.images.prepare import load_model
from lowtide.jobs.upscale.settings import UpscaleSettings
from lowtide.memory import plan_store
from lowtide.models import bundled_names, describe_bundled
from lowtide.streaming.probe.measure_costs import probe_costs
from support.measured_costs import costs_of, remember_also


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def no_probe(monkeypatch):
    def probed(*_, **__):
        raise AssertionError("the model was measured")

    monkeypatch.setattr(model_costs, "probe_costs", probed)


def is_measured(path):
    sha256 = lowtide.load(path).descriptor.sha256
    parts = None, 32 * MIB
    return any(stored_costs(sha256, "cpu", "fp32", part) is not None for part in parts)


def value_of(file):
    return json.loads(zlib.decompress(file.read_bytes().partition(b"\n")[2]))


def plain(path, array):
    image = torch.from_numpy(array.astype(np.float32) / 255).permute(2, 0, 1)[None]
    result = lowtide.load(path)(image)[0].permute(1, 2, 0).numpy()
    return np.rint(result * 255).astype(int)


@pytest.mark.parametrize("name", bundled_names())
def test_shipped_costs_are_what_measuring_finds(name):
    kind = UpscaleSettings if describe_bundled(name).noise is None else DenoiseSettings
    model = load_model(kind.of(model=name))
    facts, network = model.descriptor, build_network(model, "cpu", "fp32")
    measured, _ = probe_costs(
        network,
        sha256=facts.sha256,
        weight_bytes=network_weight_bytes(network, model),
        align=facts.size.multiple_of,
        minimum=facts.size.minimum,
    )
    shipped = model_costs.shipped_costs(network, facts.sha256)
    untraced = {"traced_points": ()}
    assert measured.model_copy(update=untraced) == shipped.model_copy(update=untraced)
    for found, known in zip(measured.traced_points, shipped.traced_points, strict=True):
        assert (found.pixels, found.multiply_adds) == (known.pixels, known.multiply_adds)
        # Another machine's operators may take another workspace; of two versions of PyTorch the
        # larger ships.
        assert known.peak_bytes / 1.025 <= found.peak_bytes <= 1.02 * known.peak_bytes
        assert len(found.reused_blocks) == len(known.reused_blocks)


def test_a_bundled_model_is_not_measured(run, no_probe, read, crop, expected):
    image = run()
    assert image.accuracy.execution == "exact"
    assert np.abs(read(image.output).astype(int) - expected(crop)).max() <= 1


def test_an_unknown_model_runs_the_whole_image_at_once(run, unmeasured, no_probe, read, crop):
    image = run(model=unmeasured)
    assert image.plan.strategy.name == "whole"
    assert image.accuracy.execution == "exact"
    assert {one.title for one in image.plan.refused} == {"tiled", "streamed"}
    assert "not measured" in image.plan.refused[0].reason
    assert np.abs(read(image.output).astype(int) - plain(unmeasured, crop)).max() <= 1
    assert not is_measured(unmeasured)


def test_smaller_images_need_no_trace_of_their_own(
    run, unmeasured, save, tmp_path, crop, monkeypatch, no_probe
):
    sizes, trace = [], model_costs.trace_whole_costs

    def traced(network, size, **more):
        sizes.append(size)
        return trace(network, size, **more)

    monkeypatch.setattr(model_costs, "trace_whole_costs", traced)
    small, large = crop[:50, :70], np.concatenate([crop, crop])
    for name, array in (("a", crop), ("b", small), ("c", crop), ("d", large), ("e", small)):
        given = save(tmp_path / f"{name}.png", array)
        image = run(given=given, model=unmeasured, force=True, budget="1GiB")
        assert image.plan.strategy.name == "whole"
    assert sizes == [crop.shape[:2], large.shape[:2]]


def test_a_plan_is_that_of_the_run(run, source, unmeasured, tmp_path):
    planned = lowtide.plan(source, tmp_path / "out.png", model=unmeasured, budget="256MiB")
    assert planned.images[0].plan.title == run(model=unmeasured).plan.title
    assert not is_measured(unmeasured)


@pytest.mark.parametrize(
    "options",
    [{"tile": 48}, {"strategy": "tiled"}, {"budget": "68MiB"}],
    ids=["a tile", "tiles", "a small budget"],
)
@pytest.mark.own_process
def test_where_tiles_may_be_needed_they_are_measured(run, unmeasured, read, crop, options):
    image = run(model=unmeasured, **options)
    assert is_measured(unmeasured)
    assert image.accuracy.execution == "exact"
    assert np.abs(read(image.output).astype(int) - plain(unmeasured, crop)).max() <= 1


def test_an_edited_receptive_field_is_not_believed(run, unmeasured, cache, read, crop):
    """Tiles with less context would be reported as exact."""
    remember_also(unmeasured, "fp32")
    (file,) = cache.glob("plans/costs-*")
    edited = json.dumps(value_of(file) | {"receptive_field": 1}).encode()
    file.write_bytes(file.read_bytes().partition(b"\n")[0] + b"\n" + zlib.compress(edited))
    assert not is_measured(unmeasured)
    image = run(model=unmeasured, tile=48)
    assert value_of(file)["receptive_field"] > 1
    assert image.accuracy.execution == "exact"
    assert np.abs(read(image.output).astype(int) - plain(unmeasured, crop)).max() <= 1


def test_costs_are_those_of_a_model_precision_heap_and_processor(monkeypatch):
    costs = costs_of("lowtide-x2")
    store_costs(costs, "ab")
    assert stored_costs("ab", "cpu", "fp32") == costs
    assert stored_costs("ac", "cpu", "fp32") is None
    assert stored_costs("ab", "cpu", "bf16") is None
    assert stored_costs("ab", "cpu", "fp32", 32 * MIB) is None
    with monkeypatch.context() as patch:
        patch.setattr(heap, "_tuned", not heap._tuned)
        assert stored_costs("ab", "cpu", "fp32") is None
    monkeypatch.setattr(plan_store, "cpu_name", lambda: "another processor")
    assert stored_costs("ab", "cpu", "fp32") is None


def test_a_folder_is_measured_once(unmeasured, save, tmp_path, crop):
    for name in ("a", "b"):
        save(tmp_path / "in" / f"{name}.png", crop)
    report = lowtide.upscale(tmp_path / "in", tmp_path / "out", model=unmeasured, budget="256MiB")
    assert [image.status for image in report.images] == ["done", "done"]
    assert is_measured(unmeasured)


def test_where_memory_runs_out_tiles_are_measured(run, unmeasured, read, crop, monkeypatch):
    real, plans = image_job.execute_plan, []

    def cramped(network, adapter, source, sink, plan, **more):
        plans.append(plan)
        if len(plans) == 1:
            raise MemoryError
        return real(network, adapter, source, sink, plan, **more)

    monkeypatch.setattr(image_job, "execute_plan", cramped)
    image = run(model=unmeasured)
    assert [plan.strategy.name for plan in plans] == ["whole", "tiled"]
    assert plans[1].upper_bytes < plans[0].upper_bytes
    assert any("replanned" in event for event in image.events)
    assert np.abs(read(image.output).astype(int) - plain(unmeasured, crop)).max() <= 1


def predicted_without_runtime(plan):
    """A process's first run measures what stays of it, which a plan alone has not."""
    return plan.predicted_bytes - sum(row.value for row in plan.ledger if row.name == "runtime")


def test_a_run_is_timed_in_passing(run, source, unmeasured, monkeypatch, cache, tmp_path):
    monkeypatch.setattr(run_clock, "_LEAST_SECONDS", 0.0)
    first = run(model=unmeasured).plan
    (file,) = cache.glob("plans/clock-*")
    kept = value_of(file)
    second = lowtide.plan(source, tmp_path / "next.png", model=unmeasured, budget="256MiB")
    again = second.images[0].plan
    assert again.seconds == pytest.approx(kept["ratio"] * first.seconds)
    # The clock says how long a run takes, and decides nothing.
    assert again.model_copy(update={"seconds": 0, "choice": ""}).title == first.title
    assert predicted_without_runtime(again) == predicted_without_runtime(first)


def test_a_tile_that_is_known_to_be_too_small_is_refused_unmeasured(tmp_path, no_probe):
    network = ESRGAN(in_nc=12, num_filters=8, num_blocks=1, scale=4, plus=False, shuffle_factor=2)
    torch.save(network.state_dict(), tmp_path / "model.pth")
    Image.new("RGB", (40, 32)).save(tmp_path / "photo.png")
    with pytest.raises(lowtide.UsageError, match="--tile 6 is too small") as refused:
        lowtide.plan(
            tmp_path / "photo.png", tmp_path / "large.png", model=tmp_path / "model.pth", tile=6
        )
    assert refused.value.hint == "--tile 8 or more"
