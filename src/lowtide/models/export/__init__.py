"""Export of models to ONNX, and comparison of the files with PyTorch."""

from lowtide.models.export.onnx_check import (
    LARGEST_DIFFERENCE,
    CannotRunError,
    OnnxRunner,
    SizeCheck,
    checked_sizes,
    compare_fp32,
    compare_int8,
    cpu_seconds,
)
from lowtide.models.export.write_onnx import (
    OPSETS,
    ExportPrecision,
    quantize_onnx,
    require_level_input,
    write_metadata,
    write_onnx,
)
from lowtide.models.onnx_runtime import require_packages

__all__ = [
    "LARGEST_DIFFERENCE",
    "OPSETS",
    "CannotRunError",
    "ExportPrecision",
    "OnnxRunner",
    "SizeCheck",
    "checked_sizes",
    "compare_fp32",
    "compare_int8",
    "cpu_seconds",
    "quantize_onnx",
    "require_level_input",
    "require_packages",
    "write_metadata",
    "write_onnx",
]
