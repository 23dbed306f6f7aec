"""ONNX Runtime: a file's graph as a module of PyTorch's, given and giving tensors of the CPU."""

from __future__ import annotations

import importlib
import importlib.util
import re
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lowtide.core.errors import LowtideError, ModelError, UsageError
from lowtide.core.heap import trim_heap
from lowtide.models.onnx_providers import Provider

# onnxruntime has no base class of its errors, which derive from Exception.
_REFUSALS = (
    "NotImplemented", "Fail", "InvalidGraph", "InvalidProtobuf", "InvalidArgument",
    "RuntimeException", "EPFail", "NoSuchFile", "ModelRequiresCompilation",
)  # fmt: skip
# Its numbers of kinds of errors, and the places in its sources.
_NOISE = re.compile(
    r"^Error in execution: |\[ONNXRuntimeError\] : \d+ : \w+ : "
    r"|Exception during initialization: |Load model from .*? failed: ?|/\S+:\d+ .*?\) (?=[A-Z\[])"
)
# What matters is raised too.
_SILENT = 4
_LACKS = "Failed to allocate memory", "bad_alloc"
_CPU = Provider()
_TYPES = {torch.float32: np.float32, torch.float16: np.float16}


class CannotRunError(LowtideError):
    """ONNX Runtime cannot run the file: it lacks an operator, or it failed."""


def require_packages(*names: str, what: str = "exporting to ONNX") -> None:
    """Raise `UsageError` naming the first of these packages that is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise UsageError(f"{what} needs {name}", hint="pip install 'lowtide[export]'")


def load_runtime() -> None:
    """Import what ONNX files are read and run with. Raises `UsageError` where it is missing."""
    require_packages("onnx", "onnxruntime", what="running ONNX files")
    for name in ("onnx", "onnxruntime"):
        importlib.import_module(name)


def refusals() -> tuple[type[Exception], ...]:
    """What ONNX Runtime raises of its own accord."""
    state = importlib.import_module("onnxruntime.capi.onnxruntime_pybind11_state")
    return tuple(getattr(state, name) for name in _REFUSALS if hasattr(state, name))


def reason_of(error: Exception) -> str:
    """The first line of an error, without the runtime's name, numbers and places."""
    return _NOISE.sub("", str(error).strip().partition("\n")[0])


def open_session(
    path: Path | str, threads: int, *, patterns: bool = False, provider: Provider = _CPU
) -> Any:
    """An `onnxruntime.InferenceSession` with so many threads on the CPU.

    ``patterns`` remembers for each size where blocks lay, and holds them for all of them. Raises
    `CannotRunError` where the runtime refuses the file or cannot set the provider up, and
    `MemoryError`.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = _SILENT
    options.intra_op_num_threads = threads
    options.enable_mem_pattern = patterns
    # Threads that wait in a loop would count as processor time.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        session = onnxruntime.InferenceSession(
            str(path), options, providers=provider.chain
        )
    except refusals() as error:
        raise _told(error) from error
    if provider.first not in session.get_providers():
        # The runtime goes on with what is left, and says so in its log alone.
        raise CannotRunError(
            f"{provider.first} could not be set up: a library of its own is missing"
        )
    return session


def _told(error: Exception, where: str = "") -> Exception:
    """As an error that says it in one line; a lack of memory is one that Python knows."""
    if any(words in str(error) for words in _LACKS):
        return MemoryError(f"ONNX Runtime: {reason_of(error)}")
    return CannotRunError(where + reason_of(error))


@dataclass(frozen=True)
class Ends:
    """What a graph takes and gives: names and types, and channels of the images it takes."""

    image: str
    result: str
    given: torch.dtype
    made: torch.dtype
    channels: int


class OnnxSession:
    """A file's graph, run by ONNX Runtime, on the CPU with PyTorch's number of threads.

    Results are written straight into PyTorch's memory. What the graph needs between comes from a
    heap of the runtime's own, which is kept for the next call of the same size and given back
    before one of another (`let_go`): the C heap would keep several times what lives, since it
    cannot reuse the runtime's aligned blocks. May be called by several threads at once.
    """

    def __init__(self, path: Path, ends: Ends, provider: Provider = _CPU) -> None:
        self.path, self.provider, self._ends = path, provider, ends
        # (height, width) of the smallest image that it takes: to give memory back takes a run.
        self.least: tuple[int, int] | None = None
        self._lock, self._size = threading.Lock(), (0, 0)
        self._threads = torch.get_num_threads()
        self._session = open_session(path, self._threads, provider=provider)

    def by(self, provider: Provider) -> OnnxSession:
        """The same file by another provider. Raises `CannotRunError`."""
        session = OnnxSession(self.path, self._ends, provider)
        session.least = self.least
        return session

    def shape_of(self, image: Tensor) -> tuple[int, ...]:
        """The shape of what the graph makes of fp32 (1, C, H, W); raises as `run`."""
        ends = self._ends
        given = image.to(ends.given).numpy()
        try:
            (found,) = self._session.run([ends.result], {ends.image: given})
        except refusals() as error:
            raise _told(error, _size_of(image)) from error
        return tuple(found.shape)

    def run(self, image: Tensor, shape: tuple[int, ...]) -> Tensor:
        """fp32 (1, C, H, W) to fp32 of ``shape``, which is what the graph makes of it.

        Raises `CannotRunError` where it makes another shape or fails, and `MemoryError`.
        """
        self._prepare((image.shape[2], image.shape[3]))
        return self._run(image, shape)

    def let_go(self) -> None:
        """Give back what is kept from call to call."""
        with self._lock:
            self._shrink()
            self._size = 0, 0

    def _prepare(self, size: tuple[int, int]) -> None:
        with self._lock:
            if torch.get_num_threads() != self._threads:
                self._threads = torch.get_num_threads()
                self._session = open_session(
                    self.path, self._threads, provider=self.provider
                )
            elif size != self._size:
                self._shrink()
            self._size = size

    def _shrink(self) -> None:
        """The runtime gives memory back only after a run: here one of next to nothing."""
        if self.least is not None and self._size != (0, 0):
            self._run(torch.zeros(1, self._ends.channels, *self.least), None, shrink=True)
            trim_heap()

    def _run(
        self, image: Tensor, shape: tuple[int, ...] | None, *, shrink: bool = False
    ) -> Tensor:
        import onnxruntime

        options, ends = onnxruntime.RunOptions(), self._ends
        options.log_severity_level = _SILENT
        if shrink:
            options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        given = image.to(ends.given).contiguous()
        binding = self._session.io_binding()
        binding.bind_input(
            ends.image, "cpu", 0, _TYPES[ends.given], tuple(given.shape), given.data_ptr()
        )
        result = torch.empty(shape or 0, dtype=ends.made)
        if shape is None:
            binding.bind_output(ends.result, "cpu")
        else:
            binding.bind_output(
                ends.result, "cpu", 0, _TYPES[ends.made], shape, result.data_ptr()
            )
        try:
            self._session.run_with_iobinding(binding, options)
        except (*refusals(), RuntimeError) as error:
            self._size = -1, -1  # what it kept is to be given back before the next call
            raise _told(error, _size_of(image)) from error
        return result.float()


def _size_of(image: Tensor) -> str:
    return f"at {image.shape[3]}×{image.shape[2]}: "


class OnnxNetwork(nn.Module):
    """A session as a network: (B, C, H, W) in 0..1 to (B, C', H * scale, W * scale), fp32 on the
    CPU, one image after another.

    ``low`` is the low precision that its weights are in, if they are. Copies share the session.
    Raises `ModelError` where the runtime fails, and `MemoryError`.
    """

    def __init__(
        self, session: OnnxSession, scale: int, out_channels: int, low: str = ""
    ) -> None:
        super().__init__()
        self.session, self.scale, self.out_channels = session, scale, out_channels
        self.low = low

    def __deepcopy__(self, memo: dict[int, Any]) -> OnnxNetwork:
        # Its weights are there once, and it may be called by several threads.
        return self

    def extra_repr(self) -> str:
        """The file."""
        return str(self.session.path)

    def forward(self, images: Tensor) -> Tensor:
        """See the class."""
        if type(images) is not Tensor or images.device.type != "cpu":
            raise ModelError(
                f"{self.session.path} is run by ONNX Runtime: it has no graph that PyTorch knows"
            )
        results = [self._single(image) for image in images.split(1)]
        return results[0] if len(results) == 1 else torch.cat(results)

    def _single(self, image: Tensor) -> Tensor:
        height, width = (side * self.scale for side in image.shape[2:])
        try:
            return self.session.run(image, (1, self.out_channels, height, width))
        except CannotRunError as error:
            raise ModelError(
                f"{self.session.path}: ONNX Runtime fails {error.message}"
            ) from error
