"""What tests of folders share."""

from pathlib import Path

from lowtide.jobs.engine.journal import JOURNAL_NAME


def files_of(folder: Path) -> dict[str, bytes]:
    """What lies in a folder and below it, but for the journal."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != JOURNAL_NAME
    }


def statuses(report) -> list[str]:
    return [image.status for image in report.images]
