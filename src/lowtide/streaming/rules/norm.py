"""Norms whose statistics are of all rows: gathered while the rows are made, then applied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from lowtide.streaming.capture.graph import Node
from lowtide.streaming.rules.row_op import Reduction, RowOp, identity_region
from lowtide.streaming.rules.rule import Rule, RuleContext, RuleResult, argument, op_name
from lowtide.streaming.spans import Span

# Numbers that are centered at once: they stay in a processor's cache.
_AT_ONCE = 1 << 18
# And of 16 bits, that a card widens at once: enough to keep it busy, and little beside bands.
_WIDENED = 1 << 24
# Numbers whose sum fp32 holds well, about.
_PART = 1 << 8
# The square of a mean, as a multiple of the variance, from which on numbers are centered: their
# squares would lose this much of what they tell.
_FAR = 3


@dataclass
class Moments:
    """Count, mean and sum of squared deviations of each group, in double precision.

    Merged by Chan, Golub and LeVeque's formula (Updating Formulae and a Pairwise Algorithm for
    Computing Sample Variances, 1979): means of variances would lose what lies between bands.
    """

    count: int
    mean: Tensor
    squares: Tensor

    @classmethod
    def of(cls, groups: Tensor) -> Moments:
        """Of (groups, numbers): exact to about 1e-7, or 1e-16 of doubles."""
        count = groups.shape[1]
        exact = torch.promote_types(groups.dtype, torch.float32)
        if groups.device.type == "cpu" and groups.dtype == exact and type(groups) is Tensor:
            sums, squares = _sums(groups)
            mean = sums / count
            squares -= count * mean.square()
            far = (count * mean.square() > _FAR * squares).nonzero().flatten().tolist()
        else:
            # Some tensors have no numbers to be looked at.
            mean = _in_parts(groups).sum(-1, dtype=exact).double().sum(-1) / count
            squares, far = torch.empty_like(mean), list(range(len(groups)))
        step = max(1, _AT_ONCE // count)
        for first in range(0, len(far), step):
            part = _those(far[first : first + step])
            taken = mean[part].to(exact)
            left, found = _sums(groups[part].to(exact) - taken[:, None])
            # What was taken off is the mean but for rounding.
            mean[part] = taken.double() + left / count
            squares[part] = found - left.square() / count
        return cls(count, mean, squares.clamp_(min=0))

    @classmethod
    def on_card(cls, groups: Tensor) -> Moments:
        """The same in one kernel that updates mean and squares with each number (Welford's
        method), for a device that takes as long to begin many as to run them."""
        count, step = groups.shape[1], len(groups)
        exact = torch.promote_types(groups.dtype, torch.float32)
        if groups.dtype != exact:
            step = max(1, _WIDENED // count)
        found = [torch.var_mean(some.to(exact), 1, correction=0) for some in groups.split(step)]
        variance, mean = found[0] if len(found) == 1 else map(torch.cat, zip(*found, strict=True))
        return cls(count, mean.double(), variance.double() * count)

    def merged(self, other: Moments) -> Moments:
        """Of both together."""
        count = self.count + other.count
        apart, between = other.mean - self.mean, self.count * other.count / count
        mean = self.mean.add(apart, alpha=other.count / count)
        squares = (self.squares + other.squares).addcmul_(apart, apart, value=between)
        return Moments(count, mean, squares)

    def variance(self, correction: float = 0.0) -> Tensor:
        """Mean of squared deviations, the count lessened by ``correction``."""
        return self.squares / max(self.count - correction, 0)


def _sums(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Of each group its sum and that of its squares."""
    parts = _in_parts(groups)
    if parts.shape[-1] > 4 * _PART:  # numbers in no other parts of equal size
        even = groups.shape[1] // _PART * _PART
        some, rest = _sums(groups[:, :even].contiguous()), _sums(groups[:, even:].contiguous())
        return some[0] + rest[0], some[1] + rest[1]
    squares = torch.linalg.vector_norm(parts, dim=-1).double().square()
    return parts.sum(-1).double().sum(-1), squares.sum(-1)


def _those(places: list[int]) -> slice | list[int]:
    """A slice where they follow one another: no copy is made of what it takes."""
    return slice(places[0], places[-1] + 1) if places[-1] - places[0] < len(places) else places


def _in_parts(groups: Tensor) -> Tensor:
    """Each group in equal parts, of as few numbers as may be but not fewer than `_PART`."""
    count = groups.shape[1]
    parts = next((n for n in range(max(1, count // _PART), 0, -1) if count % n == 0), 1)
    return groups.unflatten(1, (parts, -1))


def accumulate_moments(
    group: Callable[[Tensor], Tensor], tracked: RuleContext
) -> Callable[[Moments | None, Sequence[Tensor]], Moments]:
    """What a reduction adds for a band, whose ``group`` is (groups, numbers)."""
    # Not asked of bands, since what a card will take is told by some that are on none.
    moments = Moments.of if tracked.graph.on_cpu else Moments.on_card

    def add(state: Moments | None, pieces: Sequence[Tensor]) -> Moments:
        found = moments(group(pieces[0]))
        return found if state is None else state.merged(found)

    return add


def group_norm(node: Node, tracked: RuleContext) -> RuleResult:
    """Group norm and instance norm."""
    image = node.args[0]
    rows = tracked.of(image)
    shape = node.like.shape
    if rows is None or rows.dim < 2 or shape[0] != 1:
        return None
    if op_name(node.target) == "group_norm":
        groups = node.args[1]
        weight, bias = argument(node, 2, "weight"), argument(node, 3, "bias")
        eps = argument(node, 4, "eps", 1e-5)
    else:
        if not argument(node, 5, "use_input_stats", True):
            return None
        groups, (weight, bias), eps = shape[1], node.args[1:3], node.args[7]

    def finish(moments: Moments) -> Tensor:
        return torch.stack([moments.mean, moments.variance()])

    def applied(statistics: int) -> RowOp:
        wholes = statistics, *(arg.node for arg in (weight, bias) if arg is not None)
        # The same for all bands of a run.
        known = WeakTensorKeyDictionary()

        def run(span: Span, pieces: Sequence[Tensor], whole: Sequence[Tensor]) -> Tensor:
            affine = known.get(whole[0])
            if affine is None:
                mean, variance = whole[0].repeat_interleave(shape[1] // groups, 1)
                rest = iter(whole[1:])
                scale = None if weight is None else next(rest)
                shift = None if bias is None else next(rest)
                exact = torch.promote_types(node.like.dtype, torch.float32)
                affine = known[whole[0]] = Affine.of(mean, variance, scale, shift, eps, exact)
            return affine.run(pieces[0])

        return RowOp(rows, (image.node,), wholes, identity_region(1), run, cheap=True)

    reduction = Reduction(
        rows,
        (image.node,),
        accumulate_moments(lambda band: band.reshape(groups, -1), tracked),
        finish,
    )
    return reduction, applied


@dataclass(frozen=True)
class Affine:
    """What a norm does to each number of a channel once its statistics are known: a product and a
    sum, as a batch norm of mean 0 (``none``) and variance 1 (``one``)."""

    scale: Tensor
    shift: Tensor
    none: Tensor
    one: Tensor

    @classmethod
    def of(
        cls,
        mean: Tensor,
        variance: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        exact: torch.dtype,
    ) -> Affine:
        """Of the statistics of each channel, in double precision."""
        scale = (variance + eps).rsqrt()
        scale = scale if weight is None else scale * weight
        shift = -mean * scale if bias is None else bias - mean * scale
        none, one = torch.zeros_like(mean, dtype=exact), torch.ones_like(mean, dtype=exact)
        return cls(scale.to(exact), shift.to(exact), none, one)

    def run(self, band: Tensor) -> Tensor:
        """(1, channels, ...), in one pass over memory."""
        # In the order in memory that PyTorch's norm leaves: convolutions of the other one round
        # differently, up to eight times as much.
        band = band.contiguous()
        # Not by `F.batch_norm`, which refuses an epsilon of 0 in some versions of PyTorch.
        fast = torch.backends.cudnn.enabled
        return torch.batch_norm(
            band, self.scale, self.shift, self.none, self.one, False, 0.0, 0.0, fast
        )


RULES: dict[str, Rule] = {"group_norm": group_norm, "instance_norm": group_norm}
