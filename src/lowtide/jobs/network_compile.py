"""Networks specialized for the shape of their tiles: compiled, or as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from lowtide.core.errors import ModelError
from lowtide.core.progress import Phase
from lowtide.core.units import format_seconds
from lowtide.memory.meter import CudaMeter, HostMeter, open_meter
from lowtide.memory.plan import Plan
from lowtide.streaming.specialize.cuda_graph import cuda_graph_for
from lowtide.streaming.specialize.shape_specialized import SpecializationGain
from lowtide.streaming.specialize.torch_compile import CompileCache, compile_for, preload_compiler
from lowtide.streaming.tiles.tile_step import NetworkSpec

Shape = tuple[int, ...]


@dataclass
class SpecializedNetworks:
    """A network as plans run it, specialized once for each tile shape.

    ``gain`` is what this machine has measured about compiling; None after compiling failed.
    """

    network: NetworkSpec
    sha256: str = ""
    gain: SpecializationGain | None = None
    compiled: dict[Shape, NetworkSpec] = field(default_factory=dict)
    _graphs: dict[Shape, NetworkSpec] = field(default_factory=dict)

    def for_plan(
        self,
        plan: Plan,
        *,
        required: bool,
        notes: list[str],
        events: list[str],
        meter: HostMeter | CudaMeter,
        on_phase: Callable[[Phase], None],
    ) -> NetworkSpec:
        """Return the network as ``plan`` runs it: compiled, as a CUDA graph, or plain.

        The gain of compiling is stored. Where compiling fails and was not ``required``, the plain
        network is returned, and an entry of ``events`` states why.

        Raises:
            ModelError: Compiling or capturing was requested and fails.
        """
        if not plan.compiled and not plan.cuda_graph:
            return self.network
        batch = plan.strategy.batch * plan.image.network_inputs
        shape = (batch, self.network.in_channels, *plan.network_size)
        if plan.cuda_graph:
            return self._capture(shape, notes, on_phase)
        if shape not in self.compiled:
            try:
                self.compiled[shape] = self._compile(plan, shape, notes, meter, on_phase)
            except ModelError as error:
                if required:
                    raise
                events.append(error.message)
                self.gain = None  # skip it for the next item
                return self.network
        return self.compiled[shape]

    def _compile(
        self,
        plan: Plan,
        shape: Shape,
        notes: list[str],
        meter: HostMeter | CudaMeter,
        on_phase: Callable[[Phase], None],
    ) -> NetworkSpec:
        on_phase("compile")
        with meter.excluding():
            preload_compiler()
        # Meter from here, not from the start of the job: memory that a long-lived program has freed
        # since then would hide what compiling takes.
        own_meter = open_meter("cpu")
        own_meter.start()
        try:
            network, gain = compile_for(self.network, shape)
        finally:
            own_meter.stop()
        if plan.device == "cpu":  # host memory is metered on the CPU only
            known = self.gain.host_bytes if self.gain else 0
            gain = gain.model_copy(update={"host_bytes": max(known, own_meter.peak_bytes)})
        CompileCache(plan.device).put(self.sha256, plan.precision, gain)
        notes.append(_gain_note("compiling", gain))
        return network

    def _capture(
        self, shape: Shape, notes: list[str], on_phase: Callable[[Phase], None]
    ) -> NetworkSpec:
        """Capture a CUDA graph, of one shape at a time: each holds memory while it exists."""
        if shape not in self._graphs:
            self._graphs.clear()
            on_phase("record")
            self._graphs[shape], gain = cuda_graph_for(self.network, shape)
            notes.append(_gain_note("capturing a CUDA graph", gain))
        return self._graphs[shape]


def _gain_note(what: str, gain: SpecializationGain) -> str:
    return (
        f"{what} took {format_seconds(gain.warmup_seconds)}; a run then takes"
        f" {gain.ratio:.2f} times as long"
    )
