"""Options that several commands have, each written once."""

from __future__ import annotations

from typing import Annotated, Any

import typer


def option(*names: str, panel: str, help: str, **more: Any) -> Any:
    """Return a typer option in the help panel ``panel``."""
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


def output_option(help: str, *, panel: str = "Main", metavar: str = "FILE") -> Any:
    """Return the option of what a command writes, which ``help`` says."""
    return option("-o", "--output", panel=panel, metavar=metavar, help=help)


DryRun = Annotated[bool, option("--dry-run", panel="Main", help="Print the plan and stop.")]
Force = Annotated[bool, option("--force", panel="Output", help="Replace files that exist.")]
JsonReport = Annotated[
    bool, option("--json", panel="Output", help="Print the report as JSON on stdout.")
]
Quiet = Annotated[bool, option("-q", "--quiet", panel="Output", help="No progress.")]

# Of commands on images and videos, whose folders are resumed.
Inputs = Annotated[
    list[str],
    typer.Argument(help="Files, folders (their tree is mirrored) or quoted glob patterns."),
]
Output = Annotated[
    str | None,
    output_option(
        "A file for one input; a folder for several, or with a slash at its end. Nothing is"
        " overwritten without --force.",
        metavar="PATH",
    ),
]
Redo = Annotated[
    bool, option("--force", panel="Files", help="Replace files and redo finished work.")
]
SidecarReport = Annotated[
    bool,
    option(
        "--report", panel="Output", help="Write a report next to each result, NAME.lowtide.json."
    ),
]

# By the names of their parameters: those of commands on one file, and of commands on many.
FILE_FLAGS = {
    "dry_run": DryRun,
    "force": Force,
    "report": SidecarReport,
    "as_json": JsonReport,
    "quiet": Quiet,
}
FOLDER_FLAGS = FILE_FLAGS | {"force": Redo}
