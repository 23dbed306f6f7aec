"""Proof that a model treats the images of a batch independently.

Images are streamed one after another. A model that takes the minimum or the mean over a batch, or
flips it along dim 0, returns something else for a batch than for its images, and must be detected.
The operators captured for the batch run one by one on small inputs. For each result the proof
tracks which elements some of the images can change: by propagating NaN where arithmetic carries
NaN, elsewhere by trying other values. Elements that no other image can change are independent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from lowtide.core.errors import ModelError
from lowtide.memory.plan_store import PlanStore
from lowtide.streaming.capture.export_graph import capture
from lowtide.streaming.capture.graph import Graph, Node
from lowtide.streaming.capture.model_inputs import ModelInputs
from lowtide.streaming.capture.output_container import Repack
from lowtide.streaming.certificate import call_model, module_key, relative_error, tf32
from lowtide.streaming.rules.rule import op_name
from lowtide.streaming.tolerance import tolerance

# Image sides to try until the operators are those at the real size.
_SIDES = (16, 64, 128)
# Values to try for other operators: among the values that are there, and with all others at the
# minimum or at the maximum.
_TRIED = (
    (None, ("none", "least", "most", "any")),
    ("least", ("most", "any")),
    ("most", ("least", "any")),
)
_HINT = "pass one image at a time, or call the module itself"
# Operators on floating-point values that propagate NaN to all that depends on it.
_NAN_PROPAGATING = frozenset(
    {
        *(
            f"{name}{count}d"
            for name in (
                "adaptive_avg_pool",
                "avg_pool",
                "conv",
                "conv_transpose",
                "upsample_nearest",
            )
            for count in (1, 2, 3)
        ),
        "add",
        "addmm",
        "alias",
        "baddbmm",
        "batch_norm",
        "bmm",
        "cat",
        "chunk",
        "clone",
        "contiguous",
        "convolution",
        "detach",
        "div",
        "dropout",
        "einsum",
        "elu",
        "exp",
        "expand",
        "flatten",
        "flip",
        "gelu",
        "group_norm",
        "im2col",
        "instance_norm",
        "layer_norm",
        "leaky_relu",
        "linear",
        "matmul",
        "mean",
        "mish",
        "mm",
        "mul",
        "narrow",
        "neg",
        "pad",
        "permute",
        "pixel_shuffle",
        "pixel_unshuffle",
        "prelu",
        "relu",
        "repeat",
        "reshape",
        "rms_norm",
        "roll",
        "rsqrt",
        "scaled_dot_product_attention",
        "select",
        "sigmoid",
        "silu",
        "slice",
        "softmax",
        "softplus",
        "sqrt",
        "squeeze",
        "stack",
        "std",
        "sub",
        "sum",
        "t",
        "tanh",
        "to",
        "transpose",
        "unfold",
        "unsqueeze",
        "upsample_bicubic2d",
        "upsample_bilinear2d",
        "upsample_linear1d",
        "upsample_trilinear3d",
        "var",
        "view",
        "_softmax",
        "_to_copy",
        "_unsafe_view",
    }
)


def require_independent_images(module: nn.Module, inputs: Tensor | ModelInputs) -> Repack:
    """Raise `ModelError` unless ``module`` treats a batch's images independently.

    Captures the operators at this size and at a small one. At the small size, dependences are
    tracked and the results for a batch and for single images are compared. A proof is kept in the
    plan store.

    Args:
        module: The module to check.
        inputs: Arguments of a call, or an image (B, C, H, W) alone.

    Returns:
        What turns tensors into the module's output container, for this batch.
    """
    inputs = ModelInputs.of(inputs)
    batch = inputs.batch_size
    key = module_key(module, inputs)
    whole = capture(module, inputs)
    if PlanStore().get("proof", "images", *key):
        return whole.repack
    wanted = _names(whole)
    for least in _SIDES:
        sides = {dim: inputs.first.shape[dim] for dim in inputs.side_dims()}
        small = inputs.resized(
            {dim: min(side, least + side % least) for dim, side in sides.items()}
        )
        try:
            graph = capture(module, small)
        except ModelError:
            continue  # too small for it, for example for a reflection padding
        if _names(graph) == wanted:
            with tf32(False), torch.inference_mode():
                _DependenceTracer(graph, small).require_independent()
                _require_equal_results(module, small, graph)
            PlanStore().put("proof", "images", *key, value=True)
            return whole.repack
    raise ModelError(
        f"for a batch of {batch} images this model runs other operators than for smaller images,"
        " so the images cannot be shown to be independent of each other",
        hint=_HINT,
    )


def _names(graph: Graph) -> list[str]:
    return [op_name(node.target) for node in graph.nodes if node.kind == "call"]


def _require_equal_results(module: nn.Module, inputs: ModelInputs, graph: Graph) -> None:
    """Raise `ModelError` unless a batch has the results of its images.

    This finds what depends on the batch size itself.
    """
    whole = call_model(module, inputs)
    each = zip(*(call_model(module, sample) for sample in inputs.samples()), strict=True)
    apart = max(map(relative_error, map(torch.cat, each), whole))
    if apart > tolerance(node.meta.dtype for node in graph.nodes):
        raise ModelError(
            f"this model's results for a batch of {inputs.batch_size} images differ from those for"
            f" single images by {apart:.1e} of their range",
            hint=_HINT,
        )


class _DependenceTracer:
    """A batch graph whose results are traced back to the images they depend on.

    Images are identified by the binary digits of their index: two sets of images for each digit.
    """

    def __init__(self, graph: Graph, inputs: ModelInputs) -> None:
        self._graph, self._inputs = graph, inputs
        self._batch = batch = inputs.batch_size
        self._sets = [
            [place >> digit & 1 == side for place in range(batch)]
            for digit in range((batch - 1).bit_length())
            for side in (0, 1)
        ]
        self._values = dict(graph.tensors)
        # For each set and result, the elements that the images of the set can change.
        self._dependent: list[dict[int, Tensor]] = [{} for _ in self._sets]
        self._mixing_node: Node | None = None

    def require_independent(self) -> None:
        """Raise `ModelError` where an image of the result depends on another input image."""
        nodes = *self._graph.inputs, *self._graph.fixed
        tensors = *self._inputs.streamed, *self._inputs.fixed
        for node, tensor in zip(nodes, tensors, strict=True):
            self._values[node] = tensor
            for one, touched in zip(self._sets, self._dependent, strict=True):
                if self._inputs.has_batch(tensor):
                    mask = torch.zeros_like(tensor, dtype=torch.bool)
                    mask[torch.tensor(one)] = True
                    touched[node] = mask
        for node, done in _last_uses(self._graph):
            if node.kind == "call":
                self._propagate(node)
            for index in done:
                self._values.pop(index, None)
                for touched in self._dependent:
                    touched.pop(index, None)
        for index in dict.fromkeys(self._graph.outputs):
            self._check_output(self._graph.nodes[index], self._batch)

    def _check_output(self, output: Node, batch: int) -> None:
        if output.meta.shape[0] != batch:
            raise ModelError(
                f"this model returns {output.meta.shape[0]} results for {batch} images", hint=_HINT
            )
        if not self._values[output.index].isfinite().all():
            raise ModelError(f"this model returns NaN or infinity for {batch} random images")
        for one, touched in zip(self._sets, self._dependent, strict=True):
            mask = touched.get(output.index)
            if mask is not None and mask[~torch.tensor(one)].any():
                where = f": {self._mixing_node.title} does" if self._mixing_node else ""
                raise ModelError(
                    f"this model mixes the images of a batch{where}, so they cannot be"
                    " streamed one after another",
                    hint=_HINT,
                )

    def _propagate(self, node: Node) -> None:
        value = self._values[node.index] = node.call(self._values.__getitem__)
        for touched in self._dependent:
            if any(one in touched for one in node.refs):
                mask = self._dependent_mask(node, value, touched)
                if mask.any():
                    touched[node.index] = mask
        if self._mixing_node is None:
            masks = [touched.get(node.index) for touched in self._dependent]
            for one, other in zip(masks[::2], masks[1::2], strict=True):
                if one is not None and other is not None and (one & other).any():
                    self._mixing_node = node

    def _dependent_mask(self, node: Node, value: Tensor, touched: dict[int, Tensor]) -> Tensor:
        """Return a mask of the elements of a result that the touched elements can change."""
        masks = {one: touched[one] for one in node.refs if one in touched}
        given = {one: self._values[one] for one in node.refs}
        carried = op_name(node.target) in _NAN_PROPAGATING and all(
            tensor.is_floating_point() for tensor in (value, *(given[one] for one in masks))
        )
        changed = torch.zeros_like(value, dtype=torch.bool)
        # An effect of extreme values on other elements shows among less extreme values.
        for around, draws in ((None, ("none",)),) if carried else _TRIED:
            before, among = given, value
            if around is not None:
                moving = {one for touched in self._dependent for one in touched}
                before = given | {
                    one: _other(given[one], around) for one in node.refs if one in moving
                }
                among = _result(node, before)
            for draw in draws:
                others = {
                    one: torch.where(mask, _other(given[one], draw), before[one])
                    for one, mask in masks.items()
                }
                differs = _result(node, before | others) != among
                # A value that is NaN already proves nothing, unless NaN was put in.
                changed |= differs if around is None else differs & (among == among)
        return changed


def _result(node: Node, values: Mapping[int, Tensor]) -> Tensor:
    return node.call(values.__getitem__)


def _last_uses(graph: Graph) -> Iterator[tuple[Node, Sequence[int]]]:
    """Yield each node with the results whose last use it is."""
    last = {node.index: node.index for node in graph.nodes}
    for node in graph.nodes:
        last.update(dict.fromkeys(node.refs, node.index))
    last.update(dict.fromkeys(graph.outputs, -1))
    done: dict[int, list[int]] = {}
    for index, place in last.items():
        done.setdefault(place, []).append(index)
    for node in graph.nodes:
        yield node, done.get(node.index, ())


def _other(value: Tensor, draw: str) -> Tensor:
    """Return other values of the same dtype: NaN, the minimum, the maximum, or random."""
    generator = torch.Generator().manual_seed(len(draw))
    shape, kind = value.shape, value.dtype
    if kind == torch.bool:
        if draw == "none":
            return ~value
        random = torch.rand(shape, generator=generator) < 0.5
        return random.to(value.device) if draw == "any" else torch.full_like(value, draw == "most")
    if kind.is_floating_point:
        if draw == "any":
            random = torch.randn(shape, generator=generator) * (float(value.abs().max()) + 1)
            return random.to(value.device, kind)
        odd = {"none": float("nan"), "least": -float("inf"), "most": float("inf")}
        return torch.full_like(value, odd[draw])
    # Keep indices within the range of what they point to.
    ends = {"least": value.min(), "most": value.max()}
    if draw in ends:
        return ends[draw].expand(shape)
    known = torch.cat([value.flatten(), *(end.reshape(1) for end in ends.values())])
    return known[torch.randint(len(known), shape, generator=generator).to(value.device)]
