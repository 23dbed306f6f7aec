"""ONNX files as models, run by ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from lowtide.core.errors import ModelError, UsageError
from lowtide.models.descriptor import ModelDescriptor
from lowtide.models.loaded_model import Model
from lowtide.models.onnx_behavior import ProbedModel, cannot_run
from lowtide.models.onnx_probe import probe_onnx
from lowtide.models.onnx_providers import Provider
from lowtide.models.onnx_runtime import CannotRunError, load_runtime, open_session
from lowtide.models.onnx_session import OnnxNetwork, OnnxSession


class OnnxModel(Model):
    """ONNX file as a `Model`, with CPU tensors in and out and the file's dtypes.

    `__call__` releases the memory it took. Where another provider runs the file, ``cpu_network`` is
    the same network on the CPU, for comparison.
    """

    module: OnnxNetwork
    cpu_network: OnnxNetwork | None = None

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

    def use_provider(self, provider: Provider) -> Self:
        """Run by ``provider`` from now on.

        Raises `UsageError` where ONNX Runtime has none of that name, and `ModelError` where it
        cannot be set up or refuses the file.
        """
        if provider.name == self.module.session.provider.name:
            return self
        provider.require()
        if provider.engine_cache is not None:
            provider.engine_cache.mkdir(parents=True, exist_ok=True)
        plain = self.module
        try:
            session = plain.session.with_provider(provider)
        except CannotRunError as error:
            raise ModelError(
                f"{plain.session.path} cannot be run by {provider.name}: {error.message}",
                hint="--provider cpu",
            ) from error
        self.module = OnnxNetwork(session, plain.scale, plain.out_channels, plain.low_precision)
        self.cpu_network = plain
        return self

    def another_session(self) -> object:
        """Open a second session of the file, to measure its memory."""
        session = self.module.session
        return open_session(session.path, torch.get_num_threads(), provider=session.provider)


def load(path: Path, name: str, digest: str) -> OnnxModel:
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


def _described(path: Path, name: str, digest: str, found: ProbedModel) -> ModelDescriptor:
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
