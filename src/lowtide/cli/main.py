"""Entry point of the `lowtide` command; imports next to nothing before signals are handled."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

from lowtide.cli.stop_signals import handle_stop_signals

if TYPE_CHECKING:
    from lowtide.cli.app import app as app


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lowtide.cli.app import app

    return app


def main(argv: list[str] | None = None) -> None:
    """Run the command line with ``argv``, by default that of the process.

    `_` and `-` are equal in option names, and `--debug` may stand anywhere. Arguments after a bare
    `--` are file names and stay unchanged.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--") if "--" in words else len(words)
    options, names = words[:end], words[end:]
    with handle_stop_signals(whole_process=argv is None):
        from lowtide.cli.app import run

        run(
            [_normalize_option(word) for word in options if word != "--debug"] + names,
            debug="--debug" in options,
            as_json="--json" in options,
        )


def _normalize_option(word: str) -> str:
    match = re.match(r"--[a-zA-Z0-9_.-]+", word)
    return match.group().replace("_", "-") + word[match.end() :] if match else word
