"""Forward hooks that install the weights of a block while it runs."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_iter, tree_map_only

from lowtide.core.errors import ModelError, UsageError
from lowtide.memory.offload.buffers import BufferLayout, DeviceLoader, WeightBuffer, WeightSource
from lowtide.memory.offload.placeholder import WeightPlaceholder
from lowtide.memory.offload.weight_blocks import set_tensor


class BlockHooks:
    """Streams the blocks of one model through a few weight buffers, by forward hooks.

    Buffers are filled by the loading thread alone, and modules are changed by the calling thread
    alone. A running block keeps its buffer; every other block may lose its own. ``in_flight`` is
    the number of buffers. ``loads``, ``misses`` and ``loaded_bytes`` are counters as in
    `WeightStream`.
    """

    def __init__(
        self,
        model: nn.Module,
        layouts: Sequence[BufferLayout],
        source: WeightSource,
        device_loader: DeviceLoader,
        in_flight: int,
    ) -> None:
        self._model, self._layouts, self._source, self._device_loader = (
            model,
            layouts,
            source,
            device_loader,
        )
        largest = max((layout.nbytes for layout in layouts), default=0)
        self._buffers = [device_loader.allocate(largest) for _ in range(in_flight)]
        for slot in self._buffers:
            slot.tensors = [_weight_views(layout, slot.buffer) for layout in layouts]
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="lowtide-weights")
        self._placeholders: list[list[WeightPlaceholder]] = []
        self._hooks: list[Any] = []
        self._recurrent: list[nn.Module] = []
        self._running: Counter[int] = Counter()
        self._order = _Order(len(layouts))
        self._clock = self.loads = self.misses = self.loaded_bytes = 0

    def open(self) -> None:
        """Replace the modules' weights by placeholders and register the hooks."""
        modules = dict(self._model.named_modules())  # attributes may hide a module by its name
        for index, layout in enumerate(self._layouts):
            self._placeholders.append(
                [
                    WeightPlaceholder.for_tensor(place.name, view, self._device_loader.device)
                    for place, view in zip(
                        layout.places, self._buffers[0].tensors[index], strict=True
                    )
                ]
            )
            self._remove_weights(index)
            self._disable_flatten(layout)
            owners = {id(place.owner) for place in layout.places}
            for path in layout.block.modules:
                # Submodules as well: a model may call them without calling the block.
                for part in modules[path].modules():
                    if part is modules[path] or id(part) in owners:
                        self._register_hooks(part, index)
        # Last, to be called first: no block runs when a pass begins, however the last pass ended.
        self._hooks.append(
            self._model.register_forward_pre_hook(lambda *_: self._running.clear(), prepend=True)
        )

    def _disable_flatten(self, layout: BufferLayout) -> None:
        """Disable `flatten_parameters` of recurrent layers.

        On CUDA it would copy their weights to memory of their own, in cuDNN's order, and what is
        then loaded into the buffer would no longer reach them.
        """
        for place in layout.places:
            if isinstance(place.owner, nn.RNNBase) and place.owner not in self._recurrent:
                self._recurrent.append(place.owner)
                place.owner.flatten_parameters = _do_nothing  # pyright: ignore[reportAttributeAccessIssue]

    def _register_hooks(self, part: nn.Module, index: int) -> None:
        before = functools.partial(self._pre_forward, index)
        after = functools.partial(self._post_forward, index)
        self._hooks.append(part.register_forward_pre_hook(before, prepend=True))
        self._hooks.append(part.register_forward_hook(after, always_call=True))

    def _pre_forward(self, index: int, module: nn.Module, inputs: Any) -> None:
        self._running[index] += 1  # first of all: the post-forward hook is called in any case
        if torch.is_grad_enabled():
            raise UsageError(
                "streamed weights have no gradients",
                hint="run the model under torch.inference_mode()",
            )
        if self._running[index] == 1:
            self._load_block(index)

    def _post_forward(self, index: int, module: nn.Module, inputs: Any, output: Any) -> Any:
        self._running[index] = max(0, self._running[index] - 1)
        slot = self._buffer_of(index)
        if self._running[index] or slot is None or not slot.installed:
            return None
        try:
            copied = _copy_views(output, slot.buffer)
        finally:
            # Only now: the copies out of the buffer are issued after the block, and read it too.
            self._device_loader.mark_used(slot)
        if slot.buffer._version != slot.version:
            self._evict(slot)
            raise ModelError(
                f"the block {self._layouts[index].block.name!r} changes its own weights or"
                " buffers, which streaming would lose",
                hint="plan_offload(..., resident=[...]) with the names of what changes",
            )
        return copied

    def _load_block(self, index: int) -> None:
        """Install the block's weights in its modules, and prefetch the next block's."""
        slot = self._buffer_of(index)
        if slot is None:
            self.misses += 1
            slot = self._free_buffer()
            if slot is None:
                others = [self._layouts[i].block.name for i in +self._running if i != index]
                raise ModelError(
                    f"the block {self._layouts[index].block.name!r} is called while"
                    f" {', '.join(others)} runs, and there is no buffer left for it",
                    hint="keep it in memory: plan_offload(..., resident=[...])",
                )
            self._assign(slot, index)
        assert slot.loading is not None
        try:
            slot.loading.result()
        except BaseException:
            self._evict(slot)  # the next pass tries again
            raise
        self._device_loader.wait_for_copy(slot)
        self._install(slot, index)
        self._prefetch_next(index)

    def _prefetch_next(self, index: int) -> None:
        following = self._order.record_and_predict(index)
        if self._buffer_of(following) is None and (slot := self._free_buffer()):
            self._assign(slot, following)

    def _buffer_of(self, index: int) -> WeightBuffer | None:
        return next((slot for slot in self._buffers if slot.block == index), None)

    def _free_buffer(self) -> WeightBuffer | None:
        """Return the least recently used buffer whose block is not running, or None."""
        free = [
            slot for slot in self._buffers if slot.block is None or not self._running[slot.block]
        ]
        return min(free, key=lambda slot: slot.last_used, default=None)

    def _assign(self, slot: WeightBuffer, index: int) -> None:
        self._evict(slot)
        layout = self._layouts[index]
        slot.block = index
        slot.loading = self._executor.submit(self._device_loader.load, slot, layout, self._source)
        self._touch(slot)
        self.loads += 1
        self.loaded_bytes += layout.nbytes

    def _install(self, slot: WeightBuffer, index: int) -> None:
        self._touch(slot)
        if slot.installed:
            return
        for place, tensor in zip(self._layouts[index].places, slot.tensors[index], strict=True):
            set_tensor(place, tensor)
        slot.installed, slot.version = True, slot.buffer._version

    def _touch(self, slot: WeightBuffer) -> None:
        self._clock += 1
        slot.last_used = self._clock

    def _evict(self, slot: WeightBuffer) -> None:
        if slot.installed and slot.block is not None:
            self._remove_weights(slot.block)
        if slot.loading is not None:
            slot.loading.cancel()
        slot.block, slot.loading, slot.installed = None, None, False

    def _remove_weights(self, index: int) -> None:
        for place, absent in zip(
            self._layouts[index].places, self._placeholders[index], strict=True
        ):
            set_tensor(place, absent)

    def close(self) -> None:
        """Stop the loading thread, remove the hooks, restore the model's own tensors."""
        for hook in self._hooks:
            hook.remove()
        self._executor.shutdown(cancel_futures=True)
        self._device_loader.close()
        for module in self._recurrent:
            del module.flatten_parameters
        self._recurrent.clear()
        for layout in self._layouts:
            for place in layout.places:
                set_tensor(place, place.tensor)
        self._buffers.clear()


def _do_nothing() -> None:
    """Replaces `flatten_parameters` of a recurrent layer; does nothing."""


def _weight_views(layout: BufferLayout, buffer: torch.Tensor) -> list[torch.Tensor]:
    """Return the block's parameters and buffers as views of ``buffer``."""
    return [
        view if place.is_buffer else nn.Parameter(view, requires_grad=False)
        for place, view in zip(layout.places, layout.views(buffer), strict=True)
    ]


class _Order:
    """Order of blocks, learned as they run: by the last two blocks, else by the last."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._last: tuple[int, int] = (-1, -1)
        self._successors: dict[tuple[int, int] | int, int] = {}

    def record_and_predict(self, index: int) -> int:
        """Record that ``index`` runs, and predict the next block.

        In the first pass that is the next in the list.
        """
        before, last = self._last
        if index != last:
            self._successors[before, last] = self._successors[last] = index
            self._last = (last, index)
        listed = (index + 1) % self._count
        return self._successors.get(self._last, self._successors.get(index, listed))


def _copy_views(output: Any, buffer: torch.Tensor) -> Any:
    """Return ``output`` with tensors that share memory with ``buffer`` copied.

    Returns None if there are none. An embedding returned unchanged is an example.
    """
    storage = buffer.untyped_storage()._cdata

    def inside(value: Any) -> bool:
        return (
            isinstance(value, torch.Tensor)
            and value.layout == torch.strided
            and value.untyped_storage()._cdata == storage
        )

    if not any(inside(value) for value in tree_iter(output)):
        return None
    return tree_map_only(torch.Tensor, lambda x: x.clone() if inside(x) else x, output)
