"""Weight streaming: run a model whose weights exceed the budget, block by block.

Works on any module and changes none of its code. A hook before each block waits for the block's
weights and prefetches the next block's in another thread; a hook after it releases the buffer.
Results are bit-identical to those of the resident model.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, Self

import torch
from torch import nn

from lowtide.core.errors import OutputError, UsageError
from lowtide.core.units import format_bytes
from lowtide.memory.offload.block_hooks import BlockHooks
from lowtide.memory.offload.buffers import (
    BufferLayout,
    CudaLoader,
    DeviceLoader,
    FileWeightSource,
    HostLoader,
    HostWeightSource,
    WeightSource,
)
from lowtide.memory.offload.offload_plan import OffloadPlan
from lowtide.memory.offload.resident import load_resident, match_files, move_resident
from lowtide.memory.offload.weight_blocks import align_bytes, tensor_slots
from lowtide.memory.offload.weight_files import WeightFiles, write_weights
from lowtide.memory.pinned import PinnedMemory

SourceKind = Literal["disk", "host"]


class WeightStream:
    """Handle of a model whose weights stream; a context manager, or call `close`.

    The model runs as before, under `torch.inference_mode` or `torch.no_grad`, one pass at a time.
    Its parameters outside the running block have shape, dtype and device but no values: reading
    them raises `ModelError`.
    """

    def __init__(self, hooks: BlockHooks, undo: ExitStack) -> None:
        self._hooks, self._undo = hooks, undo

    @property
    def loads(self) -> int:
        """Number of loads begun so far, prefetched or not."""
        return self._hooks.loads

    @property
    def misses(self) -> int:
        """Number of loads that were not prefetched: begun only when the block was needed."""
        return self._hooks.misses

    @property
    def loaded_bytes(self) -> int:
        """Bytes of all loads so far."""
        return self._hooks.loaded_bytes

    def close(self) -> None:
        """Stop streaming and restore the model as it was before.

        Weights that were in memory are in memory again.
        """
        with torch.inference_mode(False), torch.no_grad():
            self._undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def stream_weights(
    model: nn.Module,
    plan: OffloadPlan,
    *,
    source: SourceKind = "disk",
    scratch_dir: Path | str | None = None,
    device: str | torch.device = "cpu",
) -> WeightStream:
    """Stream the weights of a ``model`` that is in memory now, by ``plan``.

    Weights that stay resident move to ``device``. Closing restores the model, on the device where
    it was.

    Memory: ``plan.peak_bytes`` on the device. On the host of a CUDA device, buffers of the same
    size again with "disk", and the streamed weights with "host". What a block returns may be its
    weights, in any container that PyTorch's pytree knows; it must not leave views of them
    elsewhere. Recurrent layers that are streamed to CUDA copy their weights once more at each call,
    and PyTorch warns of it: cuDNN needs them in its own order.

    Args:
        source: where streamed weights are kept: "disk", a temporary safetensors file in
            ``scratch_dir``, or "host", pinned memory for a model that runs on CUDA.
        scratch_dir: folder of that file, by default the system's temporary folder; it must not be
            in memory (tmpfs).

    Raises:
        UsageError: for a plan of another model, or a source that does not suit the device.
        ModelError: for weights that cannot be written.
        OutputError: if there is no room for them.
    """
    target_device = _checked_device(source, device)
    if any(place.tensor.is_meta for place in tensor_slots(model)):
        raise UsageError("the model has no weights in memory", hint="use stream_from_file")
    layouts = _layouts(model, plan)
    with torch.inference_mode(False), torch.no_grad(), ExitStack() as undo:
        pinned = PinnedMemory()
        undo.callback(pinned.close)
        if source == "disk":
            files = _write_temporary(layouts, scratch_dir, undo)
            weight_source: WeightSource = FileWeightSource(files, permuted=True)
        else:
            weight_source = HostWeightSource(pinned)
        for layout in layouts:
            if isinstance(weight_source, HostWeightSource):
                weight_source.add(
                    layout, lambda memory, layout=layout: _copy_weights(layout, memory)
                )
            undo.callback(
                _restore_weights, layout, weight_source, [p.tensor.device for p in layout.places]
            )
            for place in layout.places:
                place.tensor.data = torch.empty(0, dtype=place.tensor.dtype)
        return _start_stream(model, plan, layouts, weight_source, target_device, pinned, undo)


def stream_from_file(
    model: nn.Module,
    files: Path | str | Sequence[Path | str],
    plan: OffloadPlan,
    *,
    source: SourceKind = "disk",
    device: str | torch.device = "cpu",
) -> WeightStream:
    """Stream the weights of a ``model`` on the meta device from safetensors ``files``.

    The weights are never in memory together: those that the plan keeps resident are read once, the
    others block by block as the model runs (or, with "host" on CUDA, once into pinned memory).
    Closing puts the meta tensors back.

    Args:
        files: a safetensors file, or the parts of one checkpoint; names are those of the model's
            ``state_dict``, dtypes are converted to the model's, and other entries are ignored. What
            the model already has in memory stays unchanged, such as buffers that are not part of a
            checkpoint.
        source: where streamed weights are kept: "disk", these files, or "host", pinned memory.

    Raises:
        UsageError: for a plan of another model, or one made before the model was on the meta
            device.
        ModelError: for files that cannot be read, and for weights that are missing or of another
            shape.
    """
    target_device = _checked_device(source, device)
    paths = [files] if isinstance(files, str | Path) else list(files)
    with torch.inference_mode(False), torch.no_grad(), ExitStack() as undo:
        pinned = PinnedMemory()
        undo.callback(pinned.close)
        weights = WeightFiles([Path(path) for path in paths])
        undo.callback(weights.close)
        named = match_files(model, weights)
        layouts = _layouts(model, plan)
        if not all(place.tensor.is_meta for layout in layouts for place in layout.places):
            raise UsageError(
                "the plan streams what the model has in memory",
                hint="plan with the model as it is now, on the meta device",
            )
        from_disk = FileWeightSource(weights, permuted=False)
        weight_source: WeightSource = from_disk
        if source == "host":
            weight_source = HostWeightSource(pinned)
            for layout in layouts:
                weight_source.add(
                    layout, lambda memory, layout=layout: from_disk.read(layout, memory)
                )
        load_resident(layouts, weights, named, target_device, undo)
        return _start_stream(model, plan, layouts, weight_source, target_device, pinned, undo)


def _checked_device(source: str, device: str | torch.device) -> torch.device:
    """Return the device with its index, after checking that ``source`` suits it."""
    found = torch.device(device)
    if source not in ("disk", "host"):
        raise UsageError(f"weights cannot be kept in {source!r}", hint='use "disk" or "host"')
    if found.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("no CUDA device is available", hint='use device="cpu"')
    if found.type == "cuda":
        index = torch.cuda.current_device() if found.index is None else found.index
        return torch.device("cuda", index)
    if found.type != "cpu":
        raise UsageError(f"weights cannot be streamed to {found.type}", hint="use cpu or cuda")
    if source == "host":
        raise UsageError(
            "on the CPU, weights kept in host memory take as much as resident ones",
            hint='use source="disk"',
        )
    return found


def _layouts(model: nn.Module, plan: OffloadPlan) -> list[BufferLayout]:
    known = {place.name: place for place in tensor_slots(model)}
    layouts = []
    if plan.streamed and plan.in_flight < 1:
        raise UsageError("the plan has no buffer for the blocks it streams")
    for block in plan.streamed:
        found = [known[name] for name in block.tensors if name in known]
        size = sum(align_bytes(place.tensor.nbytes) for place in found)
        if len(found) != len(block.tensors) or size != block.nbytes:
            raise UsageError(
                f"the plan is for another model: its block {block.name!r} has"
                f" {format_bytes(block.nbytes)}, the model's {format_bytes(size)}",
                hint="plan again with plan_offload",
            )
        layouts.append(BufferLayout(block, found))
    return layouts


def _write_temporary(
    layouts: Sequence[BufferLayout], folder: Path | str | None, undo: ExitStack
) -> WeightFiles:
    """Write all streamed weights to one temporary file."""
    size = sum(layout.nbytes for layout in layouts)
    try:
        scratch = Path(undo.enter_context(TemporaryDirectory(prefix="lowtide-", dir=folder)))
        free = shutil.disk_usage(scratch).free
        if free < size:
            raise OSError(f"{format_bytes(free)} are free")
        path = scratch / "weights.safetensors"
        named = [(place.name, place.tensor) for layout in layouts for place in layout.places]
        write_weights(path, named)
    except OSError as error:
        raise OutputError(
            f"{format_bytes(size)} of weights cannot be written to"
            f" {folder or 'the temporary folder'}: {error}",
            hint="set scratch_dir to a disk with more space",
        ) from error
    files = WeightFiles([path])
    undo.callback(files.close)  # before the folder is removed: Windows deletes no open file
    return files


def _copy_weights(layout: BufferLayout, memory: torch.Tensor) -> None:
    for place, view in zip(layout.places, layout.views(memory), strict=True):
        view.copy_(place.tensor)


def _restore_weights(
    layout: BufferLayout, source: WeightSource, devices: Sequence[torch.device]
) -> None:
    """Restore the values of the model's own tensors."""
    memory = torch.empty(layout.nbytes, dtype=torch.uint8)
    source.read(layout, memory)
    for place, view, device in zip(layout.places, layout.views(memory), devices, strict=True):
        place.tensor.data = view.to(device, copy=True)


def _start_stream(
    model: nn.Module,
    plan: OffloadPlan,
    layouts: Sequence[BufferLayout],
    source: WeightSource,
    device: torch.device,
    pinned: PinnedMemory,
    undo: ExitStack,
) -> WeightStream:
    move_resident(model, layouts, device, undo)
    loader: DeviceLoader = HostLoader()
    if device.type == "cuda":
        loader = CudaLoader(device, pinned, staged=isinstance(source, FileWeightSource))
    hooks = BlockHooks(model, layouts, source, loader, plan.in_flight)
    undo.callback(hooks.close)
    hooks.open()
    return WeightStream(hooks, undo.pop_all())
