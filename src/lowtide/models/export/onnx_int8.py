"""Static int8 quantization of ONNX files: smaller and faster, not exact."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from lowtide.attention.spatial.onnx_graph import IMAGE
from lowtide.core.errors import ModelError
from lowtide.core.logging import silence_warnings
from lowtide.models.onnx_runtime import require_packages

# Operators with weights for which runtimes have int8 kernels.
_LAYERS = "Conv", "Gemm", "MatMul"


def quantize_onnx(path: Path | str, calibration_images: Sequence[Tensor]) -> int:
    """Quantize the fp32 file of `write_onnx` to int8, in place.

    Static, by ONNX Runtime's quantizer: weights symmetric and per output channel, activations by
    their range on the calibration images ``calibration_images``, fp32 (1, C, H, W) in 0..1, of
    which there should be some from several photographs. The first and the last layer stay in fp32,
    since an image's own values pass through them. Accuracy: approximate;
    `lowtide.models.export.compare_int8` measures the loss.

    Returns:
        How many layers are in int8.

    Raises:
        UsageError: onnx or onnxruntime is missing.
        ModelError: the model has no layer between its first and its last.
    """
    require_packages("onnx", "onnxruntime", what="exporting to 8 bits")
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static

    layers = _layers(path)[1:-1]
    if not layers:
        raise ModelError(
            f"{path} has no layers that can be quantized to 8 bits", hint="--precision fp16"
        )
    with silence_warnings("root"):  # advises to simplify the graph, which the export did
        quantize_static(
            str(path),
            str(path),
            _reader(calibration_images),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=list(_LAYERS),
            nodes_to_quantize=layers,
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
        )
    return len(layers)


def _layers(path: Path | str) -> list[str]:
    """Return the names of the nodes with stored weights, from first to last."""
    import onnx

    graph = onnx.load(path).graph
    stored = {one.name for one in graph.initializer}
    return [node.name for node in graph.node if node.op_type in _LAYERS and node.input[1] in stored]


def _reader(images: Sequence[Tensor]) -> Any:
    from onnxruntime.quantization import CalibrationDataReader

    class Pictures(CalibrationDataReader):
        """Calibration images one after another, then None."""

        def __init__(self) -> None:
            self._left = iter(images)

        def get_next(self) -> Any:
            picture = next(self._left, None)
            return None if picture is None else {IMAGE: picture.numpy()}

    return Pictures()
