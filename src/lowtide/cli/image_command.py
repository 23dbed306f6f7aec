"""What commands on images share: running a job with progress and report."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lowtide.cli.progress_bar import run_with_progress
from lowtide.cli.shell import print_result
from lowtide.core.errors import UsageError

if TYPE_CHECKING:
    from lowtide.jobs.engine.report import JobReport


def run_job(
    load: Callable[[], Callable[..., JobReport]],
    inputs: list[str],
    output: str | None,
    planned_output: str,
    *,
    report: bool,
    quiet: bool,
    as_json: bool,
    **more: Any,
) -> None:
    """Run a job on images and print its report.

    Args:
        load: Imports the job and returns its function, which is called with inputs, output, and
            ``more``.
        planned_output: Stands for a missing output in a dry run, which writes nothing.
    """
    if output is None and not more["dry_run"]:
        raise UsageError("no output is given", hint="add -o OUTPUT")
    more |= {"quiet": quiet, "sidecar": report}
    output = planned_output if output is None else output
    result = run_with_progress(load, inputs, output, **more)
    from lowtide.cli.print_report import print_report, print_skipped_inputs

    print_skipped_inputs(result)
    print_result(result, lambda: print_report(result), result.raise_for_failures, as_json=as_json)
