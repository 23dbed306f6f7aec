"""Child process of `isolated_measurement`: measures operators until stdin ends."""

from __future__ import annotations

import os
import pickle
import sys
from typing import Any


def main() -> None:
    """Serve measurement requests from stdin until end of file.

    First come the settings: ``threads`` for `torch.set_num_threads`, and ``tuned`` where the C heap
    is to be tuned. Each request is one pickled operator call. Each answer is its peak in bytes, or
    a string that says why it could not be measured.
    """
    requests, responses = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    settings = pickle.load(requests)
    os.dup2(2, 1)  # libraries may print to stdout, which carries the answers
    if settings["tuned"]:
        from lowtide.core.heap import tune_heap

        tune_heap()  # the heap must be tuned before the libraries load
    import torch

    torch.set_num_threads(settings["threads"])
    while True:
        try:
            payload = pickle.load(requests)
        except EOFError:
            return
        pickle.dump(_measure_request(*pickle.loads(payload)), responses)
        responses.flush()


def _measure_request(
    name: str, overload: str, args: tuple[Any, ...], keywords: dict[str, Any]
) -> Any:
    import torch

    from lowtide.memory.prediction.cpu_workspace import measure_operator

    space, _, packet = name.partition("::")
    try:
        found = getattr(getattr(torch.ops, space), packet.partition(".")[0])
        function = getattr(found, overload)
    except AttributeError:
        return "not an operator of PyTorch"
    try:
        return measure_operator((function, args, keywords))
    except Exception as error:  # noqa: BLE001 - any error means that it cannot be measured
        return f"could not be run on zeros ({type(error).__name__})"
