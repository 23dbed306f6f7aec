"""What commands on images share: running a job with progress and report."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lowtide.cli.progress_bar import run_with_progress
from lowtide.cli.shell import print_result
from lowtide.core.errors import UsageError

if TYPE_CHECKING:
    from lowtide.jobs.engine.report import JobReport


def run_and_print_job(
    load: Callable[[], Callable[..., JobReport]],
    *given: Any,
    report: bool,
    quiet: bool,
    as_json: bool,
    **more: Any,
) -> None:
    """Run a job and print its report.

    Args:
        load: Imports the job and returns its function, which is called with what is ``given`` and
            ``more``.
        report: Write a report next to each result.
    """
    result = run_with_progress(load, *given, sidecar=report, quiet=quiet, **more)
    from lowtide.cli.print_report import print_report, print_skipped_inputs

    print_skipped_inputs(result)
    print_result(result, lambda: print_report(result), result.raise_for_failures, as_json=as_json)


def named_output(output: str | None, planned: str, settings: dict[str, Any]) -> str:
    """Return where results go, which a dry run need not be told.

    Then it is ``planned``, and whatever is there has not been asked about.

    Raises:
        UsageError: There is none.
    """
    if output is not None:
        return output
    if not settings["dry_run"] or settings["report"]:
        raise UsageError("no output is given", hint="add -o OUTPUT")
    settings["force"] = True
    return planned
