"""Weight buffers, sources of their bytes, and loaders for CPU and CUDA.

Every call to a device is in this file. A loader belongs to one device and has four operations:

    load           fill a buffer, in the loading thread; on CUDA the copy waits for the computation
                   that used the buffer last
    wait_for_copy  the computation about to be issued waits for the buffer's copy
    mark_used      the buffer may be overwritten once the computation issued so far is done
    close          no copy is in flight any more
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from lowtide.memory.offload.weight_blocks import TensorSlot, WeightBlock, align_bytes, memory_order
from lowtide.memory.offload.weight_files import WeightFiles
from lowtide.memory.pinned import PinnedMemory


class BufferLayout:
    """The tensors of one block and their offsets in a buffer."""

    def __init__(self, block: WeightBlock, places: Sequence[TensorSlot]) -> None:
        self.block, self.places = block, tuple(places)
        self.nbytes, self._offsets = 0, []
        for place in self.places:
            self._offsets.append(self.nbytes)
            self.nbytes += align_bytes(place.tensor.nbytes)
        self._specs = [
            (t.shape, t.stride(), t.dtype, t.nbytes)
            for t in (place.tensor for place in self.places)
        ]

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Return the block's tensors as strided views of ``buffer``.

        ``buffer`` is uint8 (n,) with n at least ``nbytes``; views have the shapes of the block's
        tensors.
        """
        return [
            buffer[offset : offset + nbytes].view(dtype).as_strided(shape, stride)
            for offset, (shape, stride, dtype, nbytes) in zip(
                self._offsets, self._specs, strict=True
            )
        ]


class FileWeightSource:
    """Blocks in safetensors files; ``permuted`` if `write_weights` wrote them."""

    def __init__(self, files: WeightFiles, *, permuted: bool) -> None:
        self._files, self._permuted = files, permuted

    def read(self, layout: BufferLayout, buffer: torch.Tensor) -> None:
        """Fill ``buffer``, uint8 in host memory, tensor by tensor."""
        for place, view in zip(layout.places, layout.views(buffer), strict=True):
            target = view.permute(memory_order(view)) if self._permuted else view
            self._files.read(place.name, target)

    def host_tensor(self, layout: BufferLayout) -> None:
        """Return None: files are not in host memory."""


class HostWeightSource:
    """Blocks in host memory, pinned as far as the platform allows."""

    def __init__(self, pinned: PinnedMemory) -> None:
        self._pinned = pinned
        self._blocks: dict[str, torch.Tensor] = {}

    def add(self, layout: BufferLayout, fill: Callable[[torch.Tensor], None]) -> None:
        """Allocate uint8 (bytes,) for a block, which ``fill`` writes into it."""
        memory = self._pinned.empty(layout.nbytes)
        fill(memory)
        self._blocks[layout.block.name] = memory

    def read(self, layout: BufferLayout, buffer: torch.Tensor) -> None:
        """Copy the block into ``buffer``, uint8 (bytes,)."""
        buffer[: layout.nbytes].copy_(self._blocks[layout.block.name])

    def host_tensor(self, layout: BufferLayout) -> torch.Tensor:
        """Return the block, uint8 (bytes,), without a copy."""
        return self._blocks[layout.block.name]


WeightSource = FileWeightSource | HostWeightSource


@dataclass(eq=False)
class WeightBuffer:
    """One weight buffer, the block that is loaded or loading, and its CUDA events.

    ``buffer`` and ``staging`` are uint8 (bytes,); ``tensors`` are the weights of each block as
    views of this buffer.
    """

    buffer: torch.Tensor
    staging: torch.Tensor | None = None
    copy_done: torch.cuda.Event | None = None
    compute_done: torch.cuda.Event | None = None
    tensors: list[list[torch.Tensor]] = field(default_factory=list)
    block: int | None = None
    loading: Future[None] | None = None
    installed: bool = False
    version: int = 0
    last_used: int = 0


class HostLoader:
    """Loader for the CPU: loads and computations are synchronous."""

    device = torch.device("cpu")

    def allocate(self, nbytes: int) -> WeightBuffer:
        """Allocate a buffer of exactly ``nbytes``."""
        return WeightBuffer(torch.empty(nbytes, dtype=torch.uint8))

    def load(self, slot: WeightBuffer, layout: BufferLayout, source: WeightSource) -> None:
        """Read the block straight into the buffer."""
        source.read(layout, slot.buffer)

    def wait_for_copy(self, slot: WeightBuffer) -> None:
        """Do nothing: the load is done."""

    def mark_used(self, slot: WeightBuffer) -> None:
        """Do nothing: the computation is done."""

    def close(self) -> None:
        """Do nothing: no copy is in flight."""


class CudaLoader:
    """Loader for one CUDA device: asynchronous copies on a side stream.

    Two events per buffer order copies and computation.

    With ``staged``, blocks that are not in host memory are staged in pinned memory, one staging
    buffer for each weight buffer.
    """

    def __init__(self, device: torch.device, pinned: PinnedMemory, *, staged: bool) -> None:
        self.device, self._pinned, self._staged = device, pinned, staged
        self._stream = torch.cuda.Stream(device)

    def allocate(self, nbytes: int) -> WeightBuffer:
        """Allocate a buffer of exactly ``nbytes``, and its staging buffer where needed."""
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        staging = self._pinned.empty(nbytes) if self._staged else None
        slot = WeightBuffer(buffer, staging, torch.cuda.Event(), torch.cuda.Event())
        # The allocator may have returned memory that kernels issued earlier still read; that is
        # safe on their own stream, but the first copy runs on another.
        self.mark_used(slot)
        return slot

    def load(self, slot: WeightBuffer, layout: BufferLayout, source: WeightSource) -> None:
        """Issue the copy; with staging, first wait for the buffer's previous copy."""
        assert slot.copy_done is not None and slot.compute_done is not None
        memory = source.host_tensor(layout)
        if memory is None:
            assert slot.staging is not None
            slot.copy_done.synchronize()
            source.read(layout, slot.staging)
            memory = slot.staging
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            self._stream.wait_event(slot.compute_done)
            slot.buffer[: layout.nbytes].copy_(memory[: layout.nbytes], non_blocking=True)
            slot.copy_done.record(self._stream)

    def wait_for_copy(self, slot: WeightBuffer) -> None:
        """Make the current stream wait for the buffer's copy."""
        assert slot.copy_done is not None
        torch.cuda.current_stream(self.device).wait_event(slot.copy_done)

    def mark_used(self, slot: WeightBuffer) -> None:
        """Record on the current stream when the buffer may be overwritten."""
        assert slot.compute_done is not None
        slot.compute_done.record(torch.cuda.current_stream(self.device))

    def close(self) -> None:
        """Wait for copies and kernels: the buffers go back to the allocator after this."""
        torch.cuda.synchronize(self.device)


DeviceLoader = HostLoader | CudaLoader
