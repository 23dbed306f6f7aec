"""ONNX Runtime execution providers: the CPU, or TensorRT on a GPU.

TensorRT has never been run here: it is used where it is asked for by name, and its results are
compared with the CPU's.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lowtide.core.errors import UsageError

ProviderName = Literal["cpu", "tensorrt"]
_TENSORRT = "TensorrtExecutionProvider"
# By preference: what the first one does not support falls back to those after it.
_CHAINS: dict[ProviderName, tuple[str, ...]] = {
    "cpu": ("CPUExecutionProvider",),
    "tensorrt": (_TENSORRT, "CUDAExecutionProvider", "CPUExecutionProvider"),
}


@dataclass(frozen=True)
class Provider:
    """Execution provider; ``engine_cache`` is a folder for TensorRT's engine cache.

    TensorRT takes minutes to build an engine.
    """

    name: ProviderName = "cpu"
    engine_cache: Path | None = None

    @property
    def preferred(self) -> str:
        """ONNX Runtime's name of the preferred provider."""
        return _CHAINS[self.name][0]

    @property
    def providers(self) -> list[tuple[str, dict[str, Any]]]:
        """ONNX Runtime's provider names with their options, for InferenceSession.

        Source: onnxruntime.ai, "TensorRT Execution Provider".
        """
        kept = (
            {}
            if self.engine_cache is None
            else {"trt_engine_cache_enable": True, "trt_engine_cache_path": str(self.engine_cache)}
        )
        return [(one, kept if one == _TENSORRT else {}) for one in _CHAINS[self.name]]

    def require(self) -> None:
        """Raise `UsageError` unless this machine's ONNX Runtime was built with it."""
        runtime = importlib.import_module("onnxruntime")
        known = runtime.get_available_providers()
        if self.preferred not in known:
            raise UsageError(
                f"ONNX Runtime {runtime.__version__} on this machine has no {self.preferred}; it"
                f" has {', '.join(known)}",
                hint="pip install onnxruntime-gpu tensorrt on a machine with an NVIDIA GPU, or"
                " omit --provider",
            )


CPU = Provider()
