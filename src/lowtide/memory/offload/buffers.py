"""Buffers that blocks of weights pass through, where their bytes come from, and who waits for whom.

Every call to a device is in this file. A lane belongs to one device and knows four moves:

    load     fill a slot, in the loading thread; on CUDA the copy waits for the computation that
             used the slot last
    before   the computation about to be issued waits for the slot's copy
    after    the slot may be overwritten once the computation issued so far is done
    close    nothing is in motion any more
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

import torch

from lowtide.memory.offload.weight_blocks import TensorSlot, WeightBlock, align_bytes, memory_order
from lowtide.memory.offload.weight_files import WeightFiles
from lowtide.memory.pinned import PinnedMemory


class BufferLayout:
    """The tensors of one block and where each lies in a buffer."""

    def __init__(self, block: WeightBlock, places: Sequence[TensorSlot]) -> None:
        self.block, self.places = block, tuple(places)
        self.nbytes, self._offsets = 0, []
        for place in self.places:
            self._offsets.append(self.nbytes)
            self.nbytes += align_bytes(place.tensor.nbytes)
        self._forms = [
            (t.shape, t.stride(), t.dtype, t.nbytes)
            for t in (place.tensor for place in self.places)
        ]

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The block's tensors in ``buffer`` (uint8, at least ``nbytes``), with their strides."""
        return [
            buffer[offset : offset + nbytes].view(dtype).as_strided(shape, stride)
            for offset, (shape, stride, dtype, nbytes) in zip(
                self._offsets, self._forms, strict=True
            )
        ]


class WeightSource(Protocol):
    """Where the bytes of blocks are kept."""

    def read(self, layout: BufferLayout, buffer: torch.Tensor) -> None:
        """Fill ``buffer``, uint8 in host memory, with the block."""
        ...

    def memory(self, layout: BufferLayout) -> torch.Tensor | None:
        """The block as it lies in host memory already, or None."""
        ...


class FileWeightSource:
    """Blocks in safetensors files; ``permuted`` if `write_weights` wrote them."""

    def __init__(self, files: WeightFiles, *, permuted: bool) -> None:
        self._files, self._permuted = files, permuted

    def read(self, layout: BufferLayout, buffer: torch.Tensor) -> None:
        """One read per tensor, in the order of the model."""
        for place, view in zip(layout.places, layout.views(buffer), strict=True):
            target = view.permute(memory_order(view)) if self._permuted else view
            self._files.read(place.name, target)

    def memory(self, layout: BufferLayout) -> None:
        """Files are not memory."""


class HostWeightSource:
    """Blocks in host memory, page-locked as far as the platform allows."""

    def __init__(self, pinned: PinnedMemory) -> None:
        self._pinned = pinned
        self._blocks: dict[str, torch.Tensor] = {}

    def take(self, layout: BufferLayout, fill: Callable[[torch.Tensor], None]) -> None:
        """Make room for a block and have ``fill`` write it there."""
        memory = self._pinned.empty(layout.nbytes)
        fill(memory)
        self._blocks[layout.block.name] = memory

    def read(self, layout: BufferLayout, buffer: torch.Tensor) -> None:
        """A copy."""
        buffer[: layout.nbytes].copy_(self._blocks[layout.block.name])

    def memory(self, layout: BufferLayout) -> torch.Tensor:
        """No copy."""
        return self._blocks[layout.block.name]


@dataclass(eq=False)
class WeightBuffer:
    """One buffer, the block that is in it or on its way into it, and the events of its lane.

    ``tensors`` are the weights of each block as they lie in this buffer.
    """

    buffer: torch.Tensor
    staging: torch.Tensor | None = None
    copied: torch.cuda.Event | None = None
    used: torch.cuda.Event | None = None
    tensors: list[list[torch.Tensor]] = field(default_factory=list)
    block: int | None = None
    loading: Future[None] | None = None
    installed: bool = False
    version: int = 0
    turn: int = 0


class HostLoader:
    """The CPU: a load is done when the call returns, and so is a computation."""

    device = torch.device("cpu")

    def slot(self, nbytes: int) -> WeightBuffer:
        """A slot of exactly ``nbytes``."""
        return WeightBuffer(torch.empty(nbytes, dtype=torch.uint8))

    def load(self, slot: WeightBuffer, layout: BufferLayout, source: WeightSource) -> None:
        """Read the block straight into the slot."""
        source.read(layout, slot.buffer)

    def before(self, slot: WeightBuffer) -> None:
        """Nothing to wait for."""

    def after(self, slot: WeightBuffer) -> None:
        """Nothing to mark."""

    def close(self) -> None:
        """Nothing is in motion."""


class CudaLoader:
    """One CUDA device: copies on a stream of their own, ordered by two events for each slot.

    Blocks that are not in host memory already are staged in page-locked memory, one staging
    buffer for each slot.
    """

    def __init__(self, device: torch.device, pinned: PinnedMemory, *, staged: bool) -> None:
        self.device, self._pinned, self._staged = device, pinned, staged
        self._stream = torch.cuda.Stream(device)

    def slot(self, nbytes: int) -> WeightBuffer:
        """A slot of exactly ``nbytes``, and its staging buffer where one is needed."""
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        staging = self._pinned.empty(nbytes) if self._staged else None
        slot = WeightBuffer(buffer, staging, torch.cuda.Event(), torch.cuda.Event())
        # The allocator may have handed out memory that kernels issued earlier still read; that
        # is safe on their own stream, but the first copy comes on another.
        self.after(slot)
        return slot

    def load(self, slot: WeightBuffer, layout: BufferLayout, source: WeightSource) -> None:
        """Issue the copy; only for staging does the calling thread wait, for the copy before."""
        assert slot.copied is not None and slot.used is not None
        memory = source.memory(layout)
        if memory is None:
            assert slot.staging is not None
            slot.copied.synchronize()
            source.read(layout, slot.staging)
            memory = slot.staging
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            self._stream.wait_event(slot.used)
            slot.buffer[: layout.nbytes].copy_(memory[: layout.nbytes], non_blocking=True)
            slot.copied.record(self._stream)

    def before(self, slot: WeightBuffer) -> None:
        """Make the current stream wait for the slot's copy."""
        assert slot.copied is not None
        torch.cuda.current_stream(self.device).wait_event(slot.copied)

    def after(self, slot: WeightBuffer) -> None:
        """Mark the point of the current stream after which the slot may be overwritten."""
        assert slot.used is not None
        slot.used.record(torch.cuda.current_stream(self.device))

    def close(self) -> None:
        """Wait for copies and kernels: the buffers go back to the allocator after this."""
        torch.cuda.synchronize(self.device)


Lane = HostLoader | CudaLoader
