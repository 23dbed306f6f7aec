"""What training programs put before the names of a network's tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

_Value = TypeVar("_Value")
# Of torch.compile, of DataParallel, of the generator of a pair, and of Lightning's modules.
_PREFIXES = ("_orig_mod.", "module.", "netG.", "net_g.", "generator.", "model.", "net.")
_DEEPEST = 3


def strip_prefixes(
    state: Mapping[str, _Value], known: Callable[[dict[str, _Value]], bool]
) -> dict[str, _Value] | None:
    """The tensors as ``known`` knows them: with no prefix if it does so, or with as few as
    possible taken away. Tensors without the prefix (a loss's, a discriminator's) are left out.
    None where it knows them under no name.
    """
    # A part that was compiled is within a name.
    waiting = [({key.replace("._orig_mod.", "."): value for key, value in state.items()}, 0)]
    for one, depth in waiting:
        if known(one):
            return one
        for prefix in _PREFIXES if depth < _DEEPEST else ():
            part = {
                key.removeprefix(prefix): value
                for key, value in one.items()
                if key.startswith(prefix)
            }
            if part:
                waiting.append((part, depth + 1))
    return None
