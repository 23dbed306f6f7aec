"""Rules of group and instance norm: statistics by bands, then one affine pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from lowtide.streaming.capture.graph import GraphNode
from lowtide.streaming.rules.rule import (
    LoweringContext,
    Reduction,
    RowOp,
    Rule,
    RuleResult,
    identity_receptive_field,
    node_argument,
    op_name,
    samplewise_rule,
)
from lowtide.streaming.spans import Span

# Elements that are centered at once: they stay in the CPU's cache.
_CENTER_CHUNK = 1 << 18
# 16-bit elements that a GPU casts to fp32 at once: enough to keep it busy, little next to a band.
_CAST_CHUNK = 1 << 24
# Elements that fp32 sums accurately, about.
_SUM_CHUNK = 1 << 8
# Ratio of squared mean to variance above which elements are centered first: squares of uncentered
# elements would lose this much precision.
_CENTER_RATIO = 3


@dataclass
class GroupMoments:
    """Count, mean and sum of squared deviations of each group, in double precision.

    ``mean`` and ``squares`` are (groups,). Merged by Chan, Golub and LeVeque's formula (Updating
    Formulae and a Pairwise Algorithm for Computing Sample Variances, 1979): a mean of band
    variances would miss the variance between bands.
    """

    count: int
    mean: Tensor
    squares: Tensor

    @classmethod
    def from_groups(cls, groups: Tensor) -> GroupMoments:
        """Return the moments of ``groups``, (groups, elements).

        Exact to about 1e-7, or to 1e-16 for doubles.
        """
        count = groups.shape[1]
        dtype = torch.promote_types(groups.dtype, torch.float32)
        if groups.device.type == "cpu" and groups.dtype == dtype and type(groups) is Tensor:
            sums, squares = _sums(groups)
            mean = sums / count
            squares -= count * mean.square()
            off_center = (
                (count * mean.square() > _CENTER_RATIO * squares).nonzero().flatten().tolist()
            )
        else:
            # Fake tensors of a dry run have no values to inspect.
            mean = _split_groups(groups).sum(-1, dtype=dtype).double().sum(-1) / count
            squares, off_center = torch.empty_like(mean), list(range(len(groups)))
        step = max(1, _CENTER_CHUNK // count)
        for first in range(0, len(off_center), step):
            part = _as_index(off_center[first : first + step])
            center = mean[part].to(dtype)
            left, found = _sums(groups[part].to(dtype) - center[:, None])
            # The subtracted value is the mean up to rounding.
            mean[part] = center.double() + left / count
            squares[part] = found - left.square() / count
        return cls(count, mean, squares.clamp_(min=0))

    @classmethod
    def from_groups_on_gpu(cls, groups: Tensor) -> GroupMoments:
        """Return the moments of (groups, elements) from one kernel (Welford's method).

        For a GPU, which would take as long to launch several kernels as to run them.
        """
        count, step = groups.shape[1], len(groups)
        dtype = torch.promote_types(groups.dtype, torch.float32)
        if groups.dtype != dtype:
            step = max(1, _CAST_CHUNK // count)
        found = [torch.var_mean(some.to(dtype), 1, correction=0) for some in groups.split(step)]
        variance, mean = found[0] if len(found) == 1 else map(torch.cat, zip(*found, strict=True))
        return cls(count, mean.double(), variance.double() * count)

    def merged(self, other: GroupMoments) -> GroupMoments:
        """Return the moments of both sets of elements together."""
        count = self.count + other.count
        delta, between = other.mean - self.mean, self.count * other.count / count
        mean = self.mean.add(delta, alpha=other.count / count)
        squares = (self.squares + other.squares).addcmul_(delta, delta, value=between)
        return GroupMoments(count, mean, squares)

    def variance(self, correction: float = 0.0) -> Tensor:
        """Return the variance (groups,), divided by the count less ``correction``."""
        return self.squares / max(self.count - correction, 0)


def _sums(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return of each group its sum and its sum of squares."""
    parts = _split_groups(groups)
    if parts.shape[-1] > 4 * _SUM_CHUNK:  # the count has no divisor that gives smaller parts
        even = groups.shape[1] // _SUM_CHUNK * _SUM_CHUNK
        some, rest = _sums(groups[:, :even].contiguous()), _sums(groups[:, even:].contiguous())
        return some[0] + rest[0], some[1] + rest[1]
    squares = torch.linalg.vector_norm(parts, dim=-1).double().square()
    return parts.sum(-1).double().sum(-1), squares.sum(-1)


def _as_index(places: list[int]) -> slice | list[int]:
    """Return a slice where places are consecutive, since indexing by it makes no copy."""
    return slice(places[0], places[-1] + 1) if places[-1] - places[0] < len(places) else places


def _split_groups(groups: Tensor) -> Tensor:
    """Split each group into equal parts, as small as possible but at least `_SUM_CHUNK`."""
    count = groups.shape[1]
    parts = next((n for n in range(max(1, count // _SUM_CHUNK), 0, -1) if count % n == 0), 1)
    return groups.unflatten(1, (parts, -1))


def accumulate_moments(
    group: Callable[[Tensor], Tensor], context: LoweringContext
) -> Callable[[GroupMoments | None, Sequence[Tensor]], GroupMoments]:
    """Return the ``add`` of a `Reduction` that merges the `GroupMoments` of bands.

    ``group`` maps a band to (groups, elements).
    """
    # The graph's device, not the band's: in a dry run for a GPU the bands are not on it.
    moments = GroupMoments.from_groups if context.graph.on_cpu else GroupMoments.from_groups_on_gpu

    def add(state: GroupMoments | None, pieces: Sequence[Tensor]) -> GroupMoments:
        found = moments(group(pieces[0]))
        return found if state is None else state.merged(found)

    return add


def lower_group_norm(node: GraphNode, context: LoweringContext) -> RuleResult:
    """Lower group norm and instance norm to a reduction and an affine operator."""
    image = node.args[0]
    rows = context.row_axis(image)
    shape = node.meta.shape
    if rows is None or rows.dim < 2:
        return None
    if op_name(node.target) == "group_norm":
        groups = node.args[1]
        weight, bias = node_argument(node, 2, "weight"), node_argument(node, 3, "bias")
        eps = node_argument(node, 4, "eps", 1e-5)
    else:
        if not node_argument(node, 5, "use_input_stats", True):
            return None
        groups, (weight, bias), eps = shape[1], node.args[1:3], node.args[7]

    def finish(moments: GroupMoments) -> Tensor:
        return torch.stack([moments.mean, moments.variance()])

    def applied(statistics: int) -> RowOp:
        wholes = statistics, *(arg.node for arg in (weight, bias) if arg is not None)
        # computed once for all bands of a run
        known = WeakTensorKeyDictionary()

        def run(span: Span, pieces: Sequence[Tensor], whole: Sequence[Tensor]) -> Tensor:
            affine = known.get(whole[0])
            if affine is None:
                mean, variance = whole[0].repeat_interleave(shape[1] // groups, 1)
                rest = iter(whole[1:])
                scale = None if weight is None else next(rest).repeat(shape[0])
                shift = None if bias is None else next(rest).repeat(shape[0])
                exact = torch.promote_types(node.meta.dtype, torch.float32)
                affine = known[whole[0]] = NormAffine.from_statistics(
                    mean, variance, scale, shift, eps, exact
                )
            return affine.run(pieces[0])

        return RowOp(rows, (image.node,), wholes, identity_receptive_field(1), run, cheap=True)

    reduction = Reduction(
        rows,
        (image.node,),
        accumulate_moments(lambda band: band.reshape(shape[0] * groups, -1), context),
        finish,
    )
    return reduction, applied


@dataclass(frozen=True)
class NormAffine:
    """Normalization by known statistics: scale and shift per channel and sample.

    It runs as a batch norm with mean 0 (``zeros``) and variance 1 (``ones``). All are (B · C,).
    """

    scale: Tensor
    shift: Tensor
    zeros: Tensor
    ones: Tensor

    @classmethod
    def from_statistics(
        cls,
        mean: Tensor,
        variance: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        dtype: torch.dtype,
    ) -> NormAffine:
        """Return the scale and shift for statistics of each channel in double precision.

        Args:
            mean: Mean of each channel of each sample, (B · C,).
            variance: Variance of each, (B · C,).
            weight: Weight of the norm, (B · C,), or None.
            bias: Bias of the norm, (B · C,), or None.
            eps: Added to the variance.
            dtype: Dtype of the scale and shift.
        """
        scale = (variance + eps).rsqrt()
        scale = scale if weight is None else scale * weight
        shift = -mean * scale if bias is None else bias - mean * scale
        zeros, ones = torch.zeros_like(mean, dtype=dtype), torch.ones_like(mean, dtype=dtype)
        return cls(scale.to(dtype), shift.to(dtype), zeros, ones)

    def run(self, band: Tensor) -> Tensor:
        """Normalize a band (B, C, ...) in one pass over memory."""
        # Contiguous, as PyTorch's norm returns it: channels-last convolutions round differently,
        # up to eight times as much.
        shape, band = band.shape, band.contiguous()
        # not `F.batch_norm`, which rejects an epsilon of 0 in some versions of PyTorch
        fast = torch.backends.cudnn.enabled
        return torch.batch_norm(
            band.view(1, -1, *shape[2:]),
            self.scale,
            self.shift,
            self.zeros,
            self.ones,
            False,
            0.0,
            0.0,
            fast,
        ).view(shape)


RULES: dict[str, Rule] = dict.fromkeys(
    ("group_norm", "instance_norm"), samplewise_rule(lower_group_norm)
)
