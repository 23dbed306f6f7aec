"""ONNX files for tests: small graphs by hand, and a network exported."""

import numpy as np
import onnx
from onnx import TensorProto, helper

from lowtide.models.export import write_metadata, write_onnx

FLOAT, HALF = TensorProto.FLOAT, TensorProto.FLOAT16


def graph_file(
    path,
    nodes,
    weights=(),
    *,
    given=(1, 3, "h", "w"),
    kind=FLOAT,
    made=FLOAT,
    inputs=("x",),
    outputs=("y",),
    opset=20,
    metadata=None,
):
    """Write nodes from ``x`` to ``y``; ``weights`` are arrays by name."""
    stored = [onnx.numpy_helper.from_array(array, name) for name, array in dict(weights).items()]
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info(name, kind, given) for name in inputs],
        [helper.make_tensor_value_info(name, made, None) for name in outputs],
        stored,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)
    helper.set_model_props(model, metadata or {})
    onnx.save(model, path)
    return path


def conv_file(path, channels=3, kind=np.float32, side=3, **options):
    """A convolution of a picture to a picture of the same size."""
    weight = np.random.default_rng(0).standard_normal((channels, channels, side, side)) / 10
    half = HALF if kind == np.float16 else FLOAT
    options = {"given": (1, channels, "h", "w"), "kind": half, "made": half, **options}
    node = helper.make_node("Conv", ["x", "w"], ["y"], pads=[side // 2] * 4)
    return graph_file(path, [node], {"w": weight.astype(kind)}, **options)


def exported(model, path, *, labeled=True):
    """``model`` as `lowtide export onnx` writes it, with or without metadata."""
    write_onnx(model, path)
    if labeled:
        write_metadata(path, model, precision="fp32", checked=True)
    return path
