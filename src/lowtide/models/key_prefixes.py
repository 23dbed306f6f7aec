"""Removal of the prefixes that training programs add to state_dict keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

_Value = TypeVar("_Value")
# Of torch.compile, DataParallel, the generator of a GAN, and Lightning modules.
_PREFIXES = ("_orig_mod.", "module.", "netG.", "net_g.", "generator.", "model.", "net.")
_DEEPEST = 3


def strip_prefixes(
    state: Mapping[str, _Value], accepts: Callable[[dict[str, _Value]], bool]
) -> dict[str, _Value] | None:
    """Remove as few prefixes as possible so that ``accepts`` accepts the state_dict.

    Tensors without the prefix (a loss's, a discriminator's) are left out. Returns None where
    ``accepts`` accepts it under no prefix.
    """
    # A compiled submodule has its prefix inside the key.
    waiting = [({key.replace("._orig_mod.", "."): value for key, value in state.items()}, 0)]
    for one, depth in waiting:
        if accepts(one):
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
