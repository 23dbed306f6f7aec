"""Check that a model treats the images of a batch independently.

Images are streamed one after another. A model that takes the minimum or the mean over a batch, or
flips it along dim 0, returns something else for a batch than for its images, and must be detected.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor, nn

from lowtide.core.errors import ModelError
from lowtide.memory.plan_store import JsonCache
from lowtide.memory.tracing.python_places import PythonStatePlaces
from lowtide.streaming.capture.export_graph import capture_graph
from lowtide.streaming.capture.graph import OperatorGraph
from lowtide.streaming.capture.model_inputs import ModelInputs
from lowtide.streaming.capture.outputs import Repack, dtype_tolerance, error_words, relative_error
from lowtide.streaming.certificate import allow_tf32, call_model, module_key
from lowtide.streaming.rules.rule import op_name

# Image sides to try until the operators are those at the real size.
_SIDES = (16, 64, 128)
# Factors of other images: what depends on the largest or the least value of a batch may do so only
# beyond a limit.
_FACTORS = (1e6, -1e6)
_HINT = "pass one image at a time, or call the module itself"


def require_independent_images(module: nn.Module, inputs: Tensor | ModelInputs) -> Repack:
    """Raise `ModelError` unless ``module`` treats a batch's images independently.

    Captures the operators at this size and at a small one where they are the same, and compares the
    results for a small batch with those for its images, of equal and of very different values. The
    outcome is kept in the plan store.

    Args:
        module: The module to check.
        inputs: Arguments of a call, or an image (B, C, H, W) alone.

    Returns:
        What turns tensors into the module's output container, for this batch.
    """
    inputs = ModelInputs.of(inputs)
    whole = capture_graph(module, inputs)
    key = module_key(module, inputs, whole.digest, whole.written_attributes)
    if JsonCache().get("proof", "images", *key):
        return whole.repack
    wanted = _names(whole)
    for least in _SIDES:
        sides = {dim: inputs.first.shape[dim] for dim in inputs.side_dims()}
        small = inputs.resized(
            {dim: min(side, least + side % least) for dim, side in sides.items()}
        )
        try:
            graph = capture_graph(module, small)
        except ModelError:
            continue  # too small for it, for example for a reflection padding
        if _names(graph) == wanted:
            limit = dtype_tolerance(node.meta.dtype for node in graph.nodes)
            with PythonStatePlaces(module).kept(), allow_tf32(False), torch.inference_mode():
                alone = [call_model(module, sample) for sample in small.samples()]
                images = range(small.batch_size)
                _require_equal_results(call_model(module, small), alone, images, limit)
                for places, factor in product(_halves(small.batch_size), _FACTORS):
                    others = [one for one in images if one not in places]
                    together = call_model(module, _scaled(small, others, factor))
                    _require_equal_results(together, alone, places, limit)
            JsonCache().put("proof", "images", *key, value=True)
            return whole.repack
    raise ModelError(
        f"for a batch of {inputs.batch_size} images this model runs other operators than for"
        " smaller images, so the images cannot be shown to be independent of each other",
        hint=_HINT,
    )


def _names(graph: OperatorGraph) -> list[str]:
    return [op_name(node.target) for node in graph.nodes if node.kind == "call"]


def _halves(batch: int) -> list[list[int]]:
    """Return parts of a batch, by the binary digits of places: any two differ in one of them."""
    return [
        [place for place in range(batch) if place >> digit & 1 == side]
        for digit in range((batch - 1).bit_length())
        for side in (0, 1)
    ]


def _scaled(inputs: ModelInputs, places: Sequence[int], factor: float) -> ModelInputs:
    """Return the call with the images at ``places`` times ``factor``.

    Of whole numbers, which may name classes, the largest become the least.
    """
    scaled = [tensor.clone() for tensor in inputs.streamed]
    for tensor in scaled:
        if tensor.is_floating_point():
            tensor[places] *= factor
        elif tensor.dtype == torch.bool:
            tensor[places] = ~tensor[places]
        else:
            tensor[places] = tensor.max() + tensor.min() - tensor[places]
    return inputs.with_streamed(scaled)


def _require_equal_results(
    together: Sequence[Tensor],
    alone: Sequence[Sequence[Tensor]],
    places: Sequence[int],
    limit: float,
) -> None:
    """Raise `ModelError` unless images at ``places`` of a batch have the results of each alone."""
    for place in places:
        for result, one in zip(together, alone[place], strict=True):
            if not one.isfinite().all():
                raise ModelError("this model returns NaN or infinity for a random image")
            difference = relative_error(result[place : place + 1], one)
            if difference > limit or len(result) != len(alone):
                raise ModelError(
                    "this model mixes the images of a batch, so they cannot be streamed one after"
                    f" another: a result differs from that for one image {error_words(difference)}",
                    hint=_HINT,
                )
