"""The other end of ``apart``: measures operators in this process until nobody asks any more."""

from __future__ import annotations

import os
import pickle
import sys
from typing import Any


def main(settings: dict[str, Any]) -> None:
    """Answer with the bytes of each operator, or a sentence on why there are none."""
    questions, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    if settings["tuned"]:
        from lowtide.core.heap import tune_heap

        tune_heap()  # before the libraries load
    import torch

    torch.set_num_threads(settings["threads"])
    while True:
        try:
            words = pickle.load(questions)
        except EOFError:
            return
        pickle.dump(_answer(*pickle.loads(words)), answers)
        answers.flush()


def _answer(name: str, overload: str, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    import torch

    from lowtide.memory.prediction.cpu_workspace import measure

    space, _, packet = name.partition("::")
    try:
        found = getattr(getattr(torch.ops, space), packet.partition(".")[0])
        function = getattr(found, overload)
    except AttributeError:
        return "not PyTorch's own"
    try:
        return measure((function, args, keywords))
    except Exception as error:  # noqa: BLE001 - whatever it is, it cannot be measured
        return f"not run with zeros ({type(error).__name__})"
