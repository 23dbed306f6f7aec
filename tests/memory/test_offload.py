"""Streamed weights: the same bytes come out, less memory is used, and nothing is left behind."""

import hashlib
import json
import os
import subprocess
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from streamed_models import (
    ZOO,
    Again,
    Chosen,
    Convolutions,
    Mixed,
    Recurrent,
    Stack,
    Tied,
    build,
    inputs,
    state_of,
)
from torch import nn

from lowtide.core.errors import BudgetError, ModelError, OutputError, UsageError
from lowtide.core.units import MIB
from lowtide.memory.offload.blocks import find_blocks, places
from lowtide.memory.offload.files import WeightFiles, write_weights
from lowtide.memory.offload.plan import OffloadPlan, plan_offload
from lowtide.memory.offload.slots import HostLane, HostSource, Layout
from lowtide.memory.offload.stream import stream_from_file, stream_weights
from lowtide.memory.offload.turns import BlockTurns
from lowtide.memory.pinned import PinnedMemory


def plan_all(model, *, in_flight=2, split_layers=False, resident=()):
    """Stream everything that can be, in the smallest pieces."""
    blocks = find_blocks(model, largest_bytes=0, split_layers=split_layers, resident=resident)
    return OffloadPlan(
        resident=tuple(block for block in blocks if not block.modules),
        streamed=tuple(block for block in blocks if block.modules),
        in_flight=in_flight, budget_bytes=0,
    )  # fmt: skip


def run(model, count=1):
    with torch.inference_mode():
        return [model(inputs()) for _ in range(count)][-1]


def same(left, right):
    return left.dtype == right.dtype and left.tolist() == right.tolist()


@pytest.fixture
def layers():
    """Eight layers, of which two are in memory at a time."""
    model = build(Chosen)
    with stream_weights(model, plan_all(model)) as stream:
        yield model, stream


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Models this small only make threads wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    assert not [t for t in threading.enumerate() if t.name.startswith("lowtide-weights")]


# What comes out


@pytest.mark.parametrize("split_layers", [False, True], ids=["layers", "modules"])
@pytest.mark.parametrize("in_flight", [1, 2, 3])
@pytest.mark.parametrize("kind", ZOO)
def test_the_same_bytes_and_the_model_back(kind, in_flight, split_layers, tmp_path):
    model, expected = build(kind), run(build(kind))
    before, tensors = state_of(model), [*model.parameters(), *model.buffers()]
    strides = [tensor.stride() for tensor in tensors]
    plan = plan_all(model, in_flight=in_flight, split_layers=split_layers)
    with stream_weights(model, plan, scratch_dir=tmp_path) as stream:
        results = [run(model) for _ in range(3)]
        assert stream.loads >= len(plan.streamed)
    assert all(same(result, expected) for result in results)
    assert state_of(model) == before
    assert all(a is b for a, b in
               zip(tensors, [*model.parameters(), *model.buffers()], strict=True))  # fmt: skip
    assert [tensor.stride() for tensor in tensors] == strides
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not [*tmp_path.iterdir()]
    assert same(run(model), expected)


@pytest.mark.parametrize("kind", ZOO)
def test_any_budget_gives_the_same_bytes(kind):
    model, expected = build(kind), run(build(kind))
    total = sum(block.nbytes for block in find_blocks(model))
    with pytest.raises(BudgetError) as caught:
        plan_offload(model, 1)
    smallest = caught.value.smallest
    assert smallest is not None
    for share in (0, 0.2, 0.5, 0.9):
        plan = plan_offload(model, int(smallest + share * (total - smallest)))
        with stream_weights(model, plan):
            assert same(run(model, 2), expected)


def test_recurrent_layers_let_the_buffers_go():
    """They keep lists of their weights, which have to follow."""
    model = build(Recurrent)
    with stream_weights(model, plan_all(model)):
        run(model)
    for layer in model.layers:
        kept = [getattr(layer, name) for name in layer._flat_weights_names]
        assert all(a is b for a, b in zip(layer._flat_weights, kept, strict=True))


def test_a_plan_that_streams_nothing_changes_nothing():
    model = build(Stack)
    with stream_weights(model, plan_offload(model, 1 << 30)) as stream:
        assert same(run(model), run(build(Stack)))
    assert stream.loads == 0


def test_gradients_work_again_afterwards():
    model = build(Stack)
    with torch.inference_mode(), stream_weights(model, plan_all(model)):
        run(model)
    model(inputs()).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


class WatchedLane(HostLane):
    """Notes what a lane of a device relies on: who may touch a slot, and when."""

    def __init__(self):
        self.loaded, self.used = set(), set()

    def load(self, slot, layout, source):
        assert slot not in self.used
        self.loaded.discard(slot)
        super().load(slot, layout, source)
        self.loaded.add(slot)

    def before(self, slot):
        assert slot in self.loaded
        self.used.add(slot)

    def after(self, slot):
        assert slot in self.used
        self.used.discard(slot)


@pytest.mark.parametrize("in_flight", [1, 2, 3])
@pytest.mark.parametrize("kind", [Stack, Again, Mixed])
def test_blocks_in_host_memory_and_the_moves_of_a_lane(kind, in_flight):
    """What CUDA streams from, and what its events stand for, on the CPU."""
    model, expected = build(kind), run(build(kind))
    found = {place.name: place for place in places(model)}
    layouts = [Layout(block, [found[name] for name in block.tensors])
               for block in plan_all(model).streamed]  # fmt: skip
    source, lane = HostSource(PinnedMemory()), WatchedLane()
    for layout in layouts:
        source.take(layout, lambda memory, layout=layout: [
            view.copy_(place.tensor.detach())
            for place, view in zip(layout.places, layout.views(memory), strict=True)
        ])  # fmt: skip
    turns = BlockTurns(model, layouts, source, lane, in_flight)
    turns.open()
    assert same(run(model, 3), expected)
    turns.close()
    assert not lane.used
    assert same(run(model), expected)


# Which block is loaded when


@pytest.mark.parametrize("kind", [Stack, Again])
def test_nothing_is_waited_for_once_the_order_is_known(kind):
    model = build(kind)
    with stream_weights(model, plan_all(model)) as stream:
        run(model, 2)
        misses, loads = stream.misses, stream.loads
        run(model, 3)
        assert stream.misses == misses
        assert stream.loads > loads


def test_one_slot_loads_when_needed():
    model = build(Stack)
    plan = plan_all(model, in_flight=1)
    with stream_weights(model, plan) as stream:
        run(model, 2)
    assert stream.misses == stream.loads == 2 * len(plan.streamed)
    assert stream.loaded_bytes == 2 * plan.streamed_bytes


def test_blocks_may_be_left_out_repeated_and_reordered(layers):
    model, stream = layers
    orders = [(0, 1, 2), (7, 6, 5, 4), (3, 3, 3), (1, 5, 1, 5, 0), (), (0, 1, 2, 3, 4, 5, 6, 7)]
    for order in orders * 2:
        model.chosen = order
        resident = build(Chosen)
        resident.chosen = order
        assert same(run(model), run(resident))
    assert stream.loads > 0


def test_a_block_called_again_is_not_loaded_again(layers):
    model, stream = layers
    model.chosen = (4,) * 10
    run(model)
    before = stream.loads
    model.chosen = (4,) * 20
    run(model)
    assert stream.loads - before <= 4


# What goes wrong


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


def test_a_file_that_is_cut_off_is_named_and_can_come_back(tmp_path):
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


# Models without memory of their own


@pytest.fixture
def stored(tmp_path):
    """A function that saves a model's weights in some way and builds it without memory."""

    def store(kind, *, parts=1, change=lambda state: state):
        form = torch.contiguous_format
        state = {k: v.clone(memory_format=form) for k, v in build(kind).state_dict().items()}
        state = change(state)
        paths = [tmp_path / f"{part}.safetensors" for part in range(parts)]
        for part, path in enumerate(paths):
            save_file(dict(list(state.items())[part::parts]), path)
        with torch.device("meta"):
            return kind().eval(), paths

    return store


@pytest.mark.parametrize("kind", [Stack, Again, Tied, Convolutions, Mixed])
def test_from_a_file(stored, kind):
    model, paths = stored(kind)
    with stream_from_file(model, paths[0], plan_all(model)):
        assert same(run(model, 3), run(build(kind)))
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_from_several_files_with_more_in_them(stored):
    model, paths = stored(Stack, parts=3, change=lambda s: s | {"ema.decay": torch.ones(3)})
    with stream_from_file(model, paths, plan_all(model)):
        assert same(run(model, 2), run(build(Stack)))


def test_types_and_layouts_are_converted(stored):
    model, paths = stored(Convolutions)
    model = model.bfloat16()
    resident = build(Convolutions).bfloat16()
    with stream_from_file(model, paths, plan_all(model)), torch.inference_mode():
        assert same(model(inputs().bfloat16()), resident(inputs().bfloat16()))


def test_a_tied_weight_may_have_either_name(stored):
    for dropped in ("first.weight", "last.weight"):
        model, paths = stored(
            Tied, change=lambda s, name=dropped: {k: v for k, v in s.items() if k != name}
        )
        with stream_from_file(model, paths, plan_all(model)):
            assert model.first.weight is model.last.weight
            assert same(run(model), run(build(Tied)))


def test_what_no_file_holds_is_what_the_model_has(stored):
    class Rotary(Stack):
        def __init__(self):
            super().__init__()
            for layer in self.layers:
                with torch.device("cpu"):
                    layer.register_buffer("angles", torch.ones(32), persistent=False)

        def forward(self, x):
            return super().forward(x) * self.layers[3].angles[:8]

    model, paths = stored(Rotary)
    angles = model.layers[3].angles
    with stream_from_file(model, paths, plan_all(model)):
        assert same(run(model), run(build(Stack)))
    assert model.layers[3].angles is angles


def test_weights_that_are_missing_or_of_another_shape(stored, tmp_path):
    model, paths = stored(Stack, change=lambda s: {k: v for k, v in s.items() if "norm" not in k})
    with pytest.raises(ModelError, match=r"16 tensors .*layers\.0\.norm\.weight"):
        stream_from_file(model, paths, plan_all(model))
    model, paths = stored(Stack, change=lambda s: s | {"place": torch.ones(3)})
    with pytest.raises(ModelError, match=r"place is \(3,\) in the file, \(32,\)"):
        stream_from_file(model, paths, plan_all(model))
    (tmp_path / "text.safetensors").write_text("hello")
    for name in ("text", "missing"):
        with pytest.raises(ModelError, match=f"{name}.safetensors cannot be read"):
            stream_from_file(model, tmp_path / f"{name}.safetensors", plan_all(model))
    real = build(Stack)
    with pytest.raises(UsageError, match="what the model has in memory"):
        stream_from_file(real, paths, plan_all(real))


def test_written_files_are_ordinary_ones(tmp_path):
    tensors = dict(build(Mixed).named_parameters()) | dict(build(Mixed).named_buffers())
    write_weights(tmp_path / "x.safetensors", [*tensors.items()])
    read = load_file(tmp_path / "x.safetensors")
    assert {k: v.tolist() for k, v in read.items()} == {k: v.tolist() for k, v in tensors.items()}
    files = WeightFiles([tmp_path / "x.safetensors"])
    double = torch.empty(64, 8, dtype=torch.float64)
    files.read("tables.1.table", double)
    files.close()
    assert double.float().equal(tensors["tables.1.table"])


# Memory

CHILD = """
import hashlib, json, sys, torch
from torch import nn
from lowtide.memory.meter import HostMeter
from lowtide.memory.offload.stream import stream_from_file
from lowtide.memory.offload.plan import plan_offload

torch.set_num_threads(1)
budget, activations = int(sys.argv[2]), int(sys.argv[3])
x = torch.linspace(-1, 1, 1024)[None]
with torch.inference_mode():
    nn.Linear(1024, 1024, bias=False)(x)  # libraries that load at first use
with torch.device("meta"):
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(32)))
plan = plan_offload(model, budget, activation_bytes=activations)
meter = HostMeter()
meter.start()
with stream_from_file(model, sys.argv[1], plan), torch.inference_mode():
    for _ in range(2):
        y = model(x)
    digest = hashlib.sha256(y.numpy().tobytes()).hexdigest()
usage = meter.lap()
meter.stop()
print(json.dumps(dict(digest=digest, peak=usage.peak_bytes, high=usage.high_water_bytes,
                      planned=plan.peak_bytes, streamed=plan.streamed_bytes)))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the meter needs procfs")
def test_weights_of_twice_the_budget(tmp_path):
    """128 MiB of weights in a process that may take 64 MiB, and the bytes of the resident run."""
    path, budget = tmp_path / "weights.safetensors", 64 * MIB
    with torch.inference_mode():
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(32)))
        expected = model(torch.linspace(-1, 1, 1024)[None]).numpy().tobytes()
    save_file(model.state_dict(), path)
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(path), str(budget), str(4 * MIB)],
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr
    report = json.loads(child.stdout)
    assert report["digest"] == hashlib.sha256(expected).hexdigest()
    assert report["streamed"] > budget
    assert report["planned"] <= budget
    assert report["peak"] <= budget
    assert report["high"] is None or report["high"] <= budget + 16 * MIB  # code paged in
    # The plan is what is used, not a bound far above it.
    assert report["peak"] > 0.9 * (report["planned"] - 4 * MIB)


# On a GPU


def on_gpu(test):
    """Needs a CUDA device, and is skipped where there is none."""
    absent = not torch.cuda.is_available()
    return pytest.mark.gpu(pytest.mark.skipif(absent, reason="no CUDA device here")(test))


@on_gpu
@pytest.mark.parametrize("source", ["disk", "host"])
@pytest.mark.parametrize("kind", ZOO)
def test_cuda_gives_the_bytes_of_the_resident_model(kind, source):
    resident = build(kind).cuda()
    with torch.inference_mode():
        expected = resident(inputs().cuda()).cpu()
    model = build(kind)
    before = state_of(model)
    with stream_weights(model, plan_all(model), source=source, device="cuda"):
        with torch.inference_mode():
            results = [model(inputs().cuda()) for _ in range(20)]
        assert all(same(result.cpu(), expected) for result in results)
    assert state_of(model) == before
    assert not any(tensor.is_cuda for tensor in (*model.parameters(), *model.buffers()))


def chain(width, count):
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))


@on_gpu
@pytest.mark.parametrize("source", ["disk", "host"])
def test_copies_never_overtake_the_kernels_that_use_them(source, tmp_path):
    """Kernels that take longer than a copy: a buffer overwritten early changes the result."""
    model, path = chain(1024, 12), tmp_path / "weights.safetensors"
    torch.manual_seed(3)
    weights = {f"{i}.weight": torch.randn(1024, 1024) / 32 for i in range(12)}
    save_file(weights, path)
    x = torch.randn(32768, 1024, device="cuda")
    with torch.inference_mode():
        expected = x
        for weight in weights.values():
            expected = F.linear(expected, weight.cuda())
        with stream_from_file(model, path, plan_all(model), source=source, device="cuda"):
            for _ in range(10):
                assert torch.equal(model(x), expected)


@on_gpu
@pytest.mark.parametrize("source", ["disk", "host"])
def test_device_memory_is_that_of_the_plan(source, tmp_path):
    model, path = chain(4096, 8), tmp_path / "weights.safetensors"
    save_file({f"{i}.weight": torch.zeros(4096, 4096) for i in range(8)}, path)
    plan = plan_offload(model, 256 * MIB, activation_bytes=16 * MIB)
    x = torch.zeros(1, 4096, device="cuda")
    with torch.inference_mode():
        F.linear(x, torch.zeros(4096, 4096, device="cuda"))  # the library's own workspace
    torch.cuda.empty_cache()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with stream_from_file(model, path, plan, source=source, device="cuda"), torch.inference_mode():
        model(x)
    assert torch.cuda.max_memory_allocated() - base <= plan.peak_bytes
    assert plan.streamed_bytes > 256 * MIB


@on_gpu
def test_what_changes_on_the_device_comes_home():
    model, plain = build(Convolutions).train(), build(Convolutions).train().cuda()
    with torch.inference_mode():
        plain(inputs().cuda())
        with stream_weights(model, plan_all(model, resident=["1"]), device="cuda"):
            assert model[1].running_mean.is_cuda
            model(inputs().cuda())
    assert state_of(model) == state_of(plain.cpu())


@on_gpu
def test_pinned_memory_is_exact_and_limited():
    pinned = PinnedMemory()
    memory = pinned.empty(5 * MIB + 1)
    assert memory.is_pinned()
    assert pinned.pinned_bytes == 5 * MIB + 1
    pinned.limit_bytes = 6 * MIB
    assert not pinned.empty(2 * MIB).is_pinned()
    pinned.close()
    assert not memory.is_pinned()
