"""Models as files for other runtimes, and the proof that these give the same."""

from lowtide.models.export.int8 import quantize
from lowtide.models.export.onnx_check import (
    LARGEST_DIFFERENCE,
    CannotRunError,
    OnnxRunner,
    SizeCheck,
    checked_sizes,
    compare,
    compare_in_8_bits,
    processor_seconds,
)
from lowtide.models.export.onnx_file import OPSETS, ExportPrecision, label, write_onnx
from lowtide.models.onnx_runtime import require_packages

__all__ = [
    "LARGEST_DIFFERENCE",
    "OPSETS",
    "CannotRunError",
    "ExportPrecision",
    "OnnxRunner",
    "SizeCheck",
    "checked_sizes",
    "compare",
    "compare_in_8_bits",
    "label",
    "processor_seconds",
    "quantize",
    "require_packages",
    "write_onnx",
]
