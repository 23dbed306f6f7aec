"""Accuracy of one result: exact or bounded, and the measured error if not exact."""

from __future__ import annotations

from collections.abc import Callable

from lowtide.core.signal import ValueAdapter
from lowtide.jobs.engine.pipeline import JobPipeline
from lowtide.jobs.engine.report import AccuracyReport, ErrorFigure, reported_db
from lowtide.jobs.images.prepared import PreparedModel
from lowtide.media.image_info import ImageRowReader
from lowtide.memory.meter import PeakUsage
from lowtide.memory.oom import trim_allocators
from lowtide.memory.plan import Plan, StreamedStrategy, TiledStrategy
from lowtide.streaming.planner.ledger_rows import affordable_pixels, comparable_pixels
from lowtide.streaming.tiles.error_sample import SampledError, execution_error, precision_error
from lowtide.streaming.tiles.network import RunnableNetwork


def measure_accuracy(
    prepared: PreparedModel,
    plan: Plan,
    reopen: Callable[[], ImageRowReader],
    adapter: ValueAdapter,
    pipeline: JobPipeline,
    *,
    limit_bytes: int,
) -> tuple[AccuracyReport, PeakUsage | None]:
    """Measure the accuracy of one image's result within ``limit_bytes``.

    ``reopen`` opens the image once more, and ``adapter`` converts its rows.

    Returns:
        The report, and the memory that the measurement used, or None if nothing had to be measured.
    """
    if plan.accuracy == "exact" and prepared.network.make_fp32_forward is None:
        return _accuracy(prepared, plan, reopen, adapter, limit_bytes), None
    # The measurement runs other tile sizes, which would not fit the heap's free blocks.
    trim_allocators(plan.device, collect=True)
    pipeline.lap()
    pipeline.commit_all()
    accuracy = _accuracy(prepared, plan, reopen, adapter, limit_bytes)
    measurement_usage = pipeline.lap()
    trim_allocators(plan.device, collect=True)
    pipeline.lap()
    return accuracy, measurement_usage


def _accuracy(
    prepared: PreparedModel,
    plan: Plan,
    reopen: Callable[[], ImageRowReader],
    adapter: ValueAdapter,
    limit_bytes: int,
) -> AccuracyReport:
    """Report the accuracy class, and measure the error on sampled tiles if not exact."""
    network, costs = prepared.network, prepared.costs
    execution = precision = None
    strategy = plan.strategy
    if isinstance(strategy, TiledStrategy) and plan.accuracy == "bounded":
        with reopen() as rows:
            allowed = affordable_pixels(costs, plan, strategy, limit_bytes)
            error = execution_error(network, adapter, rows, plan.image, strategy, allowed)
            execution = _figure(error)
    if network.make_fp32_forward is not None:
        with reopen() as rows:
            allowed = comparable_pixels(costs, plan, limit_bytes)
            precision = _figure(precision_error(network, adapter, rows, plan.image, allowed))
    if isinstance(strategy, StreamedStrategy):
        assert prepared.programs is not None
        proof = prepared.programs.certificate(*plan.network_size)
        reason = (
            "bands of rows with all that they depend on; on a small image the result differed from"
            f" that of the whole image by {proof.error:.0e} of its largest value"
        )
    elif strategy.tiles == 1:
        reason = "the whole image at once"
    elif plan.accuracy == "exact":
        reason = (
            f"the receptive field reaches {costs.receptive_field} px, and tiles see at least"
            f" {max(costs.receptive_field or 0, (strategy.overlap - strategy.blend) // 2)} px"
        )
    elif costs.receptive_field is None:
        reason = (
            f"the receptive field reaches beyond {costs.receptive_field_search_limit} px, and"
            " tiles do not"
        )
    else:
        reason = (
            f"the receptive field reaches {costs.receptive_field} px, and an overlap of"
            f" {strategy.overlap} px covers less"
        )
    return AccuracyReport(
        execution=plan.accuracy,
        reason=reason,
        execution_error=execution,
        precision=plan.precision,
        precision_error=precision,
        precision_note=_precision_note(network),
    )


def _precision_note(network: RunnableNetwork) -> str:
    """Return which layers stay in fp32, or what differs by another runtime or in an ONNX file."""
    if network.runtime != "torch":
        return f"by {network.runtime}, whose values are within 1e-5 of PyTorch's"
    from lowtide.models.low_precision import LowPrecisionWrapper
    from lowtide.models.onnx_model import OnnxNetwork

    parts = getattr(network.forward, "modules", tuple)()
    if onnx := next((part for part in parts if isinstance(part, OnnxNetwork)), None):
        low = onnx.low_precision
        return f"with weights in {low}; the file has no others to compare with" if low else ""
    if not isinstance(network.forward, LowPrecisionWrapper):
        return ""
    reason = network.forward.reason
    if reason:
        return f"the first and the last convolution too, since with those in fp32: {reason}"
    return "all but the first and the last convolution"


def _figure(error: SampledError) -> ErrorFigure:
    return ErrorFigure(
        psnr_db=reported_db(error.psnr_db),
        max_error=error.max_error,
        tiles_sampled=error.tiles_sampled,
        tiles_total=error.tiles_total,
        reference=error.against,
    )
