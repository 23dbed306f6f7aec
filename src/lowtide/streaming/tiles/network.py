"""A network as the runs of tiles need it, whatever runtime computes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lowtide.core.option import Precision

if TYPE_CHECKING:
    import torch

Forward = Callable[[Any], Any]


@dataclass(frozen=True)
class RunnableNetwork:
    """A model as the runner needs it: a function on (B, C, H, W), with metadata.

    Attributes:
        forward: Takes sizes that already satisfy the model's size rule, on ``device``, and returns
            values that need no clamping, both in fp32 whatever it computes in: tensors where
            ``runtime`` is PyTorch, else arrays.
        scale: Output pixels per input pixel, along each axis.
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        device: Where it runs.
        precision: What most of its layers compute in.
        channels_last: Whether inputs are channels-last.
        make_fp32_forward: Returns the same model in fp32 where ``precision`` is another, to redo a
            tile whose low-precision result is not finite.
        free_memory: Frees what the network keeps between calls. For networks that do not allocate
            with PyTorch, whose memory only shows in the process's resident memory.
        runtime: What computes it: "torch", or a runtime from array to array such as "ncnn".
    """

    forward: Forward
    scale: int
    in_channels: int
    out_channels: int
    device: str = "cpu"
    precision: Precision = "fp32"
    channels_last: bool = False
    make_fp32_forward: Callable[[], Forward] | None = None
    free_memory: Callable[[], None] | None = None
    runtime: str = "torch"

    @property
    def memory_format(self) -> torch.memory_format:
        """Memory format of its inputs, where they are tensors."""
        import torch

        return torch.channels_last if self.channels_last else torch.contiguous_format
