"""ONNX files as models, run by ONNX Runtime with CPU tensors in and out."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from lowtide.core.errors import ModelError, UsageError
from lowtide.core.heap import trim_heap
from lowtide.models.descriptor import ModelDescriptor
from lowtide.models.loaded_model import Model
from lowtide.models.onnx_metadata import GraphSignature
from lowtide.models.onnx_probe import ProbedOnnxModel, cannot_run, probe_onnx
from lowtide.models.onnx_runtime import (
    LOG_FATAL,
    CannotRunError,
    convert_error,
    load_runtime,
    open_session,
    runtime_errors,
)


class OnnxSession:
    """ONNX Runtime session of a file, with PyTorch's number of threads.

    Results are written straight into PyTorch's memory. Activations come from the runtime's arena,
    which is kept for the next call of the same size and released before one of another
    (`release_memory`): the C heap would keep several times the live bytes, since it cannot reuse
    the runtime's aligned blocks. Thread-safe.
    """

    def __init__(self, path: Path, signature: GraphSignature) -> None:
        self.path, self._signature = path, signature
        # (height, width) of the smallest image: releasing the arena takes a run.
        self.smallest_size: tuple[int, int] | None = None
        self._lock, self._size = threading.Lock(), (0, 0)
        self._threads = torch.get_num_threads()
        self._session = open_session(path, self._threads)

    def run(self, image: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Run fp32 (1, C, H, W) to fp32 of ``shape``, the graph's output shape.

        Raises `CannotRunError` where it makes another shape or fails, and `MemoryError`.
        """
        self._prepare((image.shape[2], image.shape[3]))
        return self._run(image, shape)

    def warm_up(self, smallest_size: tuple[int, int]) -> None:
        """Warm up with the smallest image that the graph takes, (height, width).

        The runtime never releases what its first run allocates. Raises as `run`.
        """
        self.smallest_size = smallest_size
        self._run(torch.zeros(1, self._signature.channels, *smallest_size), None)

    def release_memory(self) -> None:
        """Release the arena that is kept between calls."""
        with self._lock:
            self._shrink()
            self._size = 0, 0

    def _prepare(self, size: tuple[int, int]) -> None:
        with self._lock:
            if torch.get_num_threads() != self._threads:
                self._threads = torch.get_num_threads()
                self._session = open_session(self.path, self._threads)
            elif size != self._size:
                self._shrink()
            self._size = size

    def _shrink(self) -> None:
        """Release the arena by a minimal run, since the runtime does so only after a run."""
        if self.smallest_size is not None and self._size != (0, 0):
            self._run(
                torch.zeros(1, self._signature.channels, *self.smallest_size), None, shrink=True
            )
            trim_heap()

    def _run(self, image: Tensor, shape: tuple[int, ...] | None, *, shrink: bool = False) -> Tensor:
        import onnxruntime

        options, ends = onnxruntime.RunOptions(), self._signature
        options.log_severity_level = LOG_FATAL
        if shrink:
            options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        image = image if ends.input_white == 1 else image * ends.input_white
        given = image.to(getattr(torch, ends.input_dtype)).contiguous()
        binding = self._session.io_binding()
        binding.bind_input(
            ends.input_name,
            "cpu",
            0,
            np.dtype(ends.input_dtype),
            tuple(given.shape),
            given.data_ptr(),
        )
        result = torch.empty(shape or 0, dtype=getattr(torch, ends.output_dtype))
        if shape is None:
            binding.bind_output(ends.output_name, "cpu")
        else:
            binding.bind_output(
                ends.output_name, "cpu", 0, np.dtype(ends.output_dtype), shape, result.data_ptr()
            )
        try:
            self._session.run_with_iobinding(binding, options)
        except (*runtime_errors(), RuntimeError) as error:
            self._size = -1, -1  # release the arena before the next call
            raise convert_error(error, _size_of(image)) from error
        result = result.float()
        return result if ends.output_white == 1 else result.div_(ends.output_white)


def _size_of(image: Tensor) -> str:
    return f"at {image.shape[3]}×{image.shape[2]}: "


class OnnxNetwork(nn.Module):
    """ONNX session as an nn.Module, for fp32 CPU images one after another.

    Maps (B, C, H, W) in 0..1 to (B, C', H * scale, W * scale). ``low_precision`` is the low
    precision of its weights, or empty. Copies share the session. Raises `ModelError` where the
    runtime fails, and `MemoryError`.
    """

    def __init__(
        self, session: OnnxSession, scale: int, out_channels: int, low_precision: str = ""
    ) -> None:
        super().__init__()
        self.session, self.scale, self.out_channels = session, scale, out_channels
        self.low_precision = low_precision

    def __deepcopy__(self, memo: dict[int, Any]) -> OnnxNetwork:
        # The session is shared: it is thread-safe, and weights are held once.
        return self

    def extra_repr(self) -> str:
        """Return the path of the file."""
        return str(self.session.path)

    def forward(self, images: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, C', H * scale, W * scale), image by image."""
        if type(images) is not Tensor or images.device.type != "cpu":
            raise ModelError(
                f"{self.session.path} is run by ONNX Runtime, so PyTorch has no graph of it"
            )
        results = [self._single(image) for image in images.split(1)]
        return results[0] if len(results) == 1 else torch.cat(results)

    def _single(self, image: Tensor) -> Tensor:
        height, width = (side * self.scale for side in image.shape[2:])
        try:
            return self.session.run(image, (1, self.out_channels, height, width))
        except CannotRunError as error:
            raise ModelError(
                f"{self.session.path}: ONNX Runtime failed {error.message}", hint=error.hint
            ) from error


class OnnxModel(Model):
    """ONNX file as a `Model`, with CPU tensors in and out and the file's dtypes.

    `__call__` releases the memory it took.
    """

    module: OnnxNetwork

    def __init__(self, module: OnnxNetwork, descriptor: ModelDescriptor) -> None:
        super().__init__(module, descriptor)
        # From the file, since the network has no parameters that PyTorch sees.
        self.descriptor = descriptor

    @property
    def device(self) -> torch.device:
        """Device of input and output: the CPU."""
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of input images: fp32, whatever the file uses inside."""
        return torch.float32

    def __call__(self, image: Tensor) -> Tensor:
        """Run on a whole image (B, C, H, W) of any size, as `Model` does.

        Raises `ModelError` where the runtime fails, and `MemoryError`.
        """
        try:
            return super().__call__(image)
        finally:
            self.module.session.release_memory()

    def to(
        self,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        memory_format: torch.memory_format | None = None,
    ) -> Self:
        """Return the model itself; a memory format changes nothing.

        Raises `UsageError` for another device than the CPU, and for another dtype than fp32.
        """
        if device is not None and str(device).partition(":")[0] != "cpu":
            raise UsageError(
                f"{self.descriptor.name} is an ONNX file, which Lowtide runs on the CPU only:"
                f" {str(device)!r} has not been verified",
                hint="the device 'cpu', or the PyTorch weights that it was exported from",
            )
        if dtype not in (None, torch.float32):
            self._check_dtype(dtype)
        return self

    def to_low_precision(self, dtype: torch.dtype) -> Self:
        """Raise `UsageError`: an ONNX file keeps the dtypes it was written in."""
        self._check_dtype(dtype)
        return self

    def _check_dtype(self, dtype: torch.dtype) -> None:
        name = str(dtype).removeprefix("torch.")
        raise UsageError(
            f"{self.descriptor.name} is an ONNX file, which keeps the dtypes it was exported in:"
            f" it does not support {name}",
            hint="export the model again: lowtide export onnx MODEL --precision fp16",
        )

    def another_session(self) -> object:
        """Open a second session of the file, to measure its memory."""
        return open_session(self.module.session.path, torch.get_num_threads())


def load_onnx_model(path: Path, name: str, digest: str) -> OnnxModel:
    """Load the model in an ONNX file whose SHA-256 is ``digest``.

    Scale and size rule are those of its metadata, where `lowtide export onnx` wrote it, and else
    probed by running small images; so is whether its values are 0..1 or 0..255. Probing runs in a
    subprocess with a limit of time and memory.

    Raises:
        ModelError: the file is damaged, the runtime does not run it, or the graph does not map one
            gray or RGB image of any size to another.
        UsageError: onnx or onnxruntime is missing.
    """
    load_runtime()
    found = probe_onnx(path)
    try:
        session = OnnxSession(path, found.facts.signature)
        rows, columns = found.size.padding(1, 1)
        session.warm_up((1 + rows, 1 + columns))
    except CannotRunError as error:
        raise cannot_run(path, error) from error
    network = OnnxNetwork(session, found.scale, found.channels, found.facts.low_precision)
    return OnnxModel(network, _described(path, name, digest, found))


def _described(path: Path, name: str, digest: str, found: ProbedOnnxModel) -> ModelDescriptor:
    facts = found.facts
    white = facts.signature.input_white, facts.signature.output_white
    return ModelDescriptor(
        name=name,
        architecture=facts.entries.get("architecture", "ONNX"),
        purpose="SR" if found.scale > 1 else "Restoration",
        scale=found.scale,
        in_channels=facts.signature.channels,
        out_channels=found.channels,
        size=found.size,
        supports_half=False,
        supports_bfloat16=False,
        tiling="supported",
        tags=(
            "ONNX",
            f"opset {facts.opset}",
            *([facts.low_precision] if facts.low_precision else []),
            *_values(white),
        ),
        parameters=facts.parameters,
        weight_bytes=facts.weight_bytes,
        sha256=digest,
        license=facts.entries.get("license"),
        path=str(path),
    )


def _values(white: tuple[int, int]) -> list[str]:
    return [] if white == (1, 1) else [f"values 0..{white[0]} to 0..{white[1]}"]
