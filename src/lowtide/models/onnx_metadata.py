"""Metadata and signature of an ONNX file, read without running it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lowtide.core.errors import ModelError
from lowtide.models.model_files import (
    DOWNLOAD_AGAIN,
    MOST_CHARACTERS,
    metadata_error,
    not_finite,
)

_DYNAMIC_SIZE_HINT = (
    "export it for any height and width, as `lowtide export onnx` does,"
    " or with dynamic_shapes of torch.onnx.export"
)
_CHANNELS = (1, 3)
_PREFIX = "lowtide."
# Constants that graphs with values of 0..255 multiply by, divide by or clip at.
_WHITE_CONSTANTS = (255.0, 1 / 255, 127.5, 1 / 127.5)


@dataclass(frozen=True)
class GraphSignature:
    """Input and output of a graph: names, NumPy dtypes, channels, white levels.

    ``input_name``, ``input_dtype`` and ``input_white`` are those of the input; ``output_name``,
    ``output_dtype`` and ``output_white`` those of the output.
    """

    input_name: str
    output_name: str
    input_dtype: str
    output_dtype: str
    channels: int
    input_white: int = 1
    output_white: int = 1


@dataclass(frozen=True)
class OnnxMetadata:
    """Signature, metadata and weight statistics of an ONNX file.

    ``entries`` are the metadata properties that `lowtide export onnx` writes, without ``lowtide.``,
    and ``license`` whoever wrote it. ``weight_bytes`` and ``parameters`` are of all tensors stored;
    ``low_precision`` is the low precision of the weights, or empty; ``has_white_constant`` is
    whether 255 or a related value is among the graph's scalar constants.
    """

    signature: GraphSignature
    entries: dict[str, str]
    opset: int
    parameters: int
    weight_bytes: int
    low_precision: str
    has_white_constant: bool


def read_onnx_metadata(path: Path) -> OnnxMetadata:
    """Read signature and metadata of an ONNX file. Needs the package onnx.

    Raises `ModelError` for damage, and for a graph that does not map one image of any height and
    width to another.
    """
    import onnx
    from google.protobuf.message import DecodeError

    try:
        return _facts(path, onnx.load(path, load_external_data=False))
    except (DecodeError, ValueError) as error:  # UnicodeDecodeError is a ValueError
        raise ModelError(
            f"{path} is not an ONNX file, or is damaged: {error}", hint=DOWNLOAD_AGAIN
        ) from error


def _facts(path: Path, model: Any) -> OnnxMetadata:
    if not model.graph.node:
        raise ModelError(
            f"{path} is not an ONNX file, or is damaged: it has no graph", hint=DOWNLOAD_AGAIN
        )
    nodes = [*_nodes(model.graph.node), *_nodes(n for f in model.functions for n in f.node)]
    weights = [*_stored(model.graph), *_tensors(nodes)]
    _require_names(nodes)
    _require_one_file(path, weights)
    _require_finite(path, weights)
    low = [one for one in weights if one.data_type in _low_types() and len(one.dims) > 1]
    return OnnxMetadata(
        signature=_parse_signature(path, model.graph),
        entries=_entries(path, model),
        opset=max((one.version for one in model.opset_import if not one.domain), default=0),
        parameters=sum(math.prod(one.dims) for one in weights),
        weight_bytes=sum(one.ByteSize() for one in weights),
        low_precision=_low_types()[low[0].data_type] if low else "",
        has_white_constant=_names_white(nodes, weights),
    )


def _entries(path: Path, model: Any) -> dict[str, str]:
    said = {one.key: one.value for one in model.metadata_props}
    own = {
        key.removeprefix(_PREFIX): value for key, value in said.items() if key.startswith(_PREFIX)
    }
    kept = {"license": said["license"], **own} if "license" in said else own
    for key, value in kept.items():
        if len(key) + len(value) > MOST_CHARACTERS:
            raise ModelError(f"{metadata_error(path)}: {key[:40]} is too long")
    return kept


def _low_types() -> dict[int, str]:
    from onnx import TensorProto

    return {
        TensorProto.FLOAT16: "fp16",
        TensorProto.BFLOAT16: "bf16",
        TensorProto.INT8: "int8",
        TensorProto.UINT8: "int8",
    }


def _nodes(nodes: Iterable[Any]) -> Iterator[Any]:
    """Iterate over nodes, subgraphs included."""
    for node in nodes:
        yield node
        for attribute in node.attribute:
            for inner in (*attribute.graphs, attribute.g):
                yield from _nodes(inner.node)


def _stored(graph: Any) -> Iterator[Any]:
    """Iterate over the initializers of a graph, sparse ones included."""
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)


def _tensors(nodes: Iterable[Any]) -> Iterator[Any]:
    """Iterate over tensors in node attributes, subgraphs included."""
    for node in nodes:
        for attribute in node.attribute:
            yield from attribute.tensors
            if attribute.HasField("t"):
                yield attribute.t
            for inner in (*attribute.graphs, attribute.g):
                yield from _stored(inner)


def _names_white(nodes: list[Any], weights: list[Any]) -> bool:
    from onnx.numpy_helper import to_array

    single = [one for one in weights if math.prod(one.dims) == 1 and one.data_type in (1, 10, 11)]
    numbers = [float(to_array(one).reshape(-1)[0]) for one in single]
    numbers += [attribute.f for node in nodes for attribute in node.attribute]
    return any(
        math.isclose(one, white, rel_tol=1e-3) for one in numbers for white in _WHITE_CONSTANTS
    )


def _require_names(nodes: list[Any]) -> None:
    """Raise `UnicodeDecodeError` for a name that is not UTF-8, before it is run."""
    for node in nodes:
        "".join((node.name, node.op_type, node.domain, *node.input, *node.output))


def _require_one_file(path: Path, weights: list[Any]) -> None:
    """Raise ModelError for external data.

    Its content would not be part of the file's hash, and its path could be any file.
    """
    from onnx.external_data_helper import uses_external_data

    for one in weights:
        if uses_external_data(one):
            where = {entry.key: entry.value for entry in one.external_data}
            raise ModelError(
                f"{path} stores its weights in another file, {where.get('location')}",
                hint='merge them into one file: onnx.save(onnx.load("model.onnx"), "one.onnx")',
            )


def _require_finite(path: Path, weights: Iterable[Any]) -> None:
    """Refuse weights with NaN or infinity: of single values and masks, that may be meant."""
    from onnx import TensorProto, numpy_helper

    for one in weights:
        if one.data_type not in (TensorProto.FLOAT, TensorProto.FLOAT16) or not one.dims:
            continue
        values = numpy_helper.to_array(one)
        if values.size and not values.max() < np.inf:
            raise not_finite(path, one.name)


def _parse_signature(path: Path, graph: Any) -> GraphSignature:
    stored = {one.name for one in graph.initializer}
    images, results = [one for one in graph.input if one.name not in stored], list(graph.output)
    if (len(images), len(results)) != (1, 1):
        raise ModelError(
            f"{path} takes {_named(images)} and returns {_named(results)};"
            " Lowtide runs models that map one image to one image"
        )
    image, result = images[0].type.tensor_type, results[0].type.tensor_type
    sides = [one.dim_value or None for one in image.shape.dim]
    if len(sides) != 4:
        raise ModelError(
            f"{path} takes {_shape(sides)}; Lowtide runs image models, (batch, channels,"
            " height, width)"
        )
    _require_sizes(path, sides)
    return GraphSignature(
        input_name=images[0].name,
        output_name=results[0].name,
        channels=sides[1] or 0,
        input_dtype=_type(path, "takes", image.elem_type),
        output_dtype=_type(path, "returns", result.elem_type),
    )


def _named(ends: list[Any]) -> str:
    return f"{len(ends)} tensors ({', '.join(one.name for one in ends)})" if ends else "nothing"


def _shape(sides: list[int | None]) -> str:
    return "×".join("?" if side is None else str(side) for side in sides) or "a scalar"


def _require_sizes(path: Path, sides: list[int | None]) -> None:
    batch, channels, height, width = sides
    if channels not in _CHANNELS:
        what = "any number of" if channels is None else str(channels)
        raise ModelError(
            f"{path} takes {_shape(sides)}, {what} channels in dimension 1; Lowtide runs"
            " grayscale (1) and RGB (3)"
        )
    if batch not in (None, 1):
        raise ModelError(f"{path} takes {batch} images at a time", hint="export it for one image")
    if height is not None or width is not None:
        raise ModelError(
            f"{path} takes images of {width or 'any'}×{height or 'any'} pixels and no others,"
            " so that no image can be run in tiles",
            hint=_DYNAMIC_SIZE_HINT,
        )


def _type(path: Path, verb: str, kind: Any) -> str:
    from onnx import TensorProto

    types = {TensorProto.FLOAT: "float32", TensorProto.FLOAT16: "float16"}
    if kind not in types:
        names = {number: name.lower() for name, number in TensorProto.DataType.items()}
        name = names.get(kind, f"type {kind}") if kind else "no tensors"
        raise ModelError(f"{path} {verb} {name}; Lowtide runs models in float32 and float16")
    return types[kind]
