"""Export of a whole model to an ONNX file with dynamic height and width, and int8 of that file."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from lowtide.attention.spatial import HierarchicalAttention
from lowtide.attention.spatial.onnx_graph import ATTENTION_OPSET, IMAGE, PLAIN_OPSET, write_graph
from lowtide.core.errors import ModelError, UsageError
from lowtide.core.logging import silence_warnings
from lowtide.core.trace_cache import trace_cache
from lowtide.core.units import format_bytes
from lowtide.models.denoiser.denoiser import LeveledDenoiser
from lowtide.models.loaded_model import Model
from lowtide.models.low_precision import LowPrecisionWrapper
from lowtide.models.onnx_model import OnnxNetwork
from lowtide.models.onnx_runtime import require_packages

ExportPrecision = Literal["fp32", "fp16", "bf16"]
OPSETS = (PLAIN_OPSET, ATTENTION_OPSET)
# The input of denoisers beside the image.
SIGMA = "sigma"
# Sides of the traced image. Primes: torch.export would take a side that a layer divides for a
# constraint.
EXAMPLE_SIDES = (41, 37)
_TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
# A protocol buffer holds less than 2 GiB; some of it is the graph's.
_MOST_BYTES = 2**31 - (64 << 20)
_UNKNOWN_OPERATOR = re.compile(r"No ONNX function found for <OpOverload\(op='([\w.]+)'")
# Operators with weights for which runtimes have int8 kernels.
_LAYERS = "Conv", "Gemm", "MatMul"


def _lowered(model: Model, precision: ExportPrecision) -> nn.Module:
    """Return the network to export, fp32 (B, C, H, W) to fp32.

    In fp16 and bf16 it is a copy with all weights and layers in that dtype, and a cast at both
    ends. Raises `UsageError` for a precision the model does not support, or an unknown one.
    """
    if precision not in get_args(ExportPrecision):
        raise UsageError(f"precision {precision!r} is not one of fp32, fp16, bf16")
    if precision == "fp32":
        return model.module
    dtype, facts = _TYPES[precision], model.descriptor
    if str(dtype).removeprefix("torch.") not in facts.dtypes:
        raise UsageError(
            f"{facts.name} ({facts.architecture}) does not support {precision};"
            f" it supports {', '.join(facts.dtypes)}",
            hint="--precision fp32",
        )
    return LowPrecisionWrapper(copy.deepcopy(model.module).to(dtype), dtype).eval()


def write_onnx(
    model: Model,
    path: Path | str,
    *,
    precision: ExportPrecision = "fp32",
    opset: int = ATTENTION_OPSET,
    progress: Callable[[str], None] | None = None,
) -> nn.Module:
    """Export ``model``, which is on the CPU, to an ONNX file at ``path``.

    The graph maps ``image`` (1, C, H, W) in 0..1 to ``result`` (1, C', H * scale, W * scale),
    unclamped, both fp32. That of a denoiser has a second input, ``sigma`` (1,) in fp32: the
    standard deviation of white noise, of values in 0..1. H and W are any that
    ``model.descriptor.size`` allows. Opset 23 has an attention operator; 20 decomposes attention
    for older runtimes. The file holds all weights, and is not checked here: see
    `lowtide.models.export.compare_fp32`. `write_metadata` writes its origin into it. Needs the
    packages onnx and onnxscript.

    Args:
        progress: Called with each step, the first of which takes minutes for a deep model.

    Returns:
        The network that was exported: that of the model, or its copy in fp16 or bf16.

    Raises:
        UsageError: onnx or onnxscript is missing, or precision or opset is unknown.
        ModelError: ONNX cannot represent the model.
    """
    require_packages("onnx", "onnxscript")
    _require_opset(opset, precision)
    _require_exportable(model)
    require_level_input(model, precision)
    network = _lowered(model, precision)
    height, width = EXAMPLE_SIDES
    rows, columns = model.descriptor.size.padding(height, width)
    channels = model.descriptor.in_channels
    image = torch.full((1, channels, height + rows, width + columns), 0.5)
    free = torch.export.Dim.DYNAMIC
    is_denoiser = isinstance(model.module, LeveledDenoiser)
    level = {SIGMA: torch.tensor([0.1])} if is_denoiser else None
    try:
        write_graph(
            _OneGraph(network),
            image,
            path,
            more=level,
            opset=opset,
            shapes={2: free, 3: free},
            progress=progress or (lambda step: None),
        )
    except torch.onnx.errors.OnnxExporterError as error:
        raise ModelError(
            f"{model.descriptor.name} ({model.descriptor.architecture}) cannot be exported:"
            f" {_reason(error)}"
        ) from error
    return network


def write_metadata(
    path: Path | str, model: Model, *, precision: ExportPrecision | Literal["int8"], checked: bool
) -> None:
    """Write metadata properties ``lowtide.*`` into an ONNX file, all of them text.

    ``lowtide.size`` is the size rule as JSON, ``lowtide.sha256`` that of the weights' file;
    ``lowtide.license`` is left out where it is not known.
    """
    import onnx

    facts = model.descriptor
    entries = {
        "architecture": facts.architecture,
        "scale": str(facts.scale),
        "sha256": facts.sha256,
        "size": json.dumps(asdict(facts.size)),
        "precision": precision,
        "checked": "yes" if checked else "no",
    }
    if facts.noise:
        entries["noise"] = facts.noise
    if facts.license:
        entries["license"] = facts.license
    graph = onnx.load(path)
    onnx.helper.set_model_props(graph, {f"lowtide.{key}": text for key, text in entries.items()})
    onnx.save(graph, path)


def _require_opset(opset: int, precision: ExportPrecision) -> None:
    if opset not in OPSETS:
        raise UsageError(
            f"opset {opset} is not one of {', '.join(map(str, OPSETS))}",
            hint=f"--opset {PLAIN_OPSET} for older runtimes",
        )
    if precision == "bf16" and opset < ATTENTION_OPSET:
        # Conv takes bfloat16 since version 22 of the operator.
        raise UsageError(
            f"opset {opset} has no convolution in bf16", hint=f"--opset {ATTENTION_OPSET}"
        )


def _require_exportable(model: Model) -> None:
    """Raise `ModelError` for models whose export would differ silently, or fail late."""
    name = model.descriptor.name
    if isinstance(model.module, OnnxNetwork):
        raise ModelError(f"{name} is an ONNX file already")
    for part in model.module.modules():
        if isinstance(part, HierarchicalAttention):
            raise ModelError(
                f"{name} cannot be exported: HierarchicalAttention is another function above"
                f" {part.chunked_tokens:,} pixels, and a graph has only one of the two",
                hint="export a variant with window attention, or without attention",
            )
    if model.descriptor.weight_bytes > _MOST_BYTES:
        raise ModelError(
            f"{name} has {format_bytes(model.descriptor.weight_bytes)} of weights;"
            f" an ONNX file can hold {format_bytes(_MOST_BYTES)}"
        )


class _OneGraph(nn.Module):
    """Network whose modules share size-dependent results during tracing.

    This saves a third of the graph of a deep network, whose export takes minutes.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, image: Tensor, sigma: Tensor | None = None) -> Tensor:
        """Run the network inside a `trace_cache`, a denoiser at the level ``sigma`` (1,)."""
        with trace_cache():
            if sigma is None:
                return self.network(image)
            assert isinstance(self.network, LeveledDenoiser)
            return self.network.forward_at(image, sigma)


def require_level_input(model: Model, precision: str) -> None:
    """Refuse a denoiser whose file could not be told by a level all that it has to know.

    Raises:
        UsageError: The precision is not fp32.
        ModelError: The network does not know white noise.
    """
    name, denoiser = model.descriptor.name, model.module
    if not isinstance(denoiser, LeveledDenoiser):
        return
    if precision != "fp32":
        raise UsageError(
            f"{name} is a denoiser, whose level is computed with in fp32: its file has no"
            f" {precision}",
            hint="--precision fp32",
        )
    config = denoiser.config
    if len(config.white_parameters) != config.noise_parameters:
        raise ModelError(
            f"{name} cannot be exported: its noise ({model.descriptor.noise}) has"
            f" {config.noise_parameters} parameters besides the level, and a file has one input",
            hint="export a denoiser of gaussian or poisson-gaussian noise",
        )


def _reason(error: BaseException) -> str:
    """Return one line: the missing ONNX operator, or the innermost error's first line."""
    innermost, seen = error, error
    while seen is not None:
        if found := _UNKNOWN_OPERATOR.search(str(seen)):
            return f"ONNX has no operator for {found[1]}"
        innermost, seen = seen, seen.__cause__
    lines = [line.strip() for line in str(innermost).splitlines() if line.strip()]
    return lines[0] if lines else type(innermost).__name__


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
