"""Child processes that run a function of Lowtide in a fresh Python."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any


def start_python(main: str, *args: str, **options: Any) -> subprocess.Popen[Any]:
    """Start a process that calls ``main``, a ``"module:function"``, and imports what this one does.

    ``args`` are its ``sys.argv[1:]``, and ``options`` those of `subprocess.Popen`. It ignores
    Ctrl-C and signals like it, which may be sent to all processes of a job: this one, which gets
    them too, has to end it.
    """
    module, function = main.split(":")
    code = (
        "import signal; [signal.signal(getattr(signal, name), signal.SIG_IGN)"
        " for name in ('SIGINT', 'SIGTERM', 'SIGHUP') if hasattr(signal, name)];"
        "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1));"
        f" from {module} import {function}; {function}()"
    )
    path = json.dumps([str(entry) for entry in sys.path])
    # -P: import nothing from the current folder before the path is set.
    return subprocess.Popen([sys.executable, "-P", "-c", code, path, *args], **options)
