"""Commands that predict what another one would do, with its options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from lowtide.cli.shell import handle_errors, option

# Options that have an effect only where files are written.
_EXCLUDED_OPTIONS = ("dry_run", "force", "report", "streams", "devices")
_DEVICE = Annotated[
    str,
    option(
        "--device",
        panel="Main",
        help=("auto, cpu, cuda:0, ... or a GPU that need not be present, such as rtx3060-12gb."),
    ),
]


def plan_command(
    run: Callable[..., None], command: Any, help: str, added: Sequence[inspect.Parameter] = ()
) -> Any:
    """Return a command that calls ``run`` with the options of ``command`` and those ``added``."""

    def plan(**given: Any) -> None:
        run(**given)

    shape = inspect.signature(command, eval_str=True)
    kept = [item for name, item in shape.parameters.items() if name not in _EXCLUDED_OPTIONS]
    kept = [item.replace(annotation=_DEVICE) if item.name == "device" else item for item in kept]
    plan.__doc__ = help
    result = handle_errors(plan)
    result.__signature__ = shape.replace(parameters=[*kept, *added])  # pyright: ignore[reportFunctionMemberAccess]
    return result
