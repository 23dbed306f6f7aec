"""LDM4TS, a latent-diffusion sampler of standardized residual paths.

`LDM4TSConfig` has its sizes, `LDM4TSModel` is the model, which is loaded on first use: sizes alone
need no PyTorch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lowtide.models.families import ModelFamily
from lowtide.models.ldm4ts.config import NAME, LDM4TSConfig

if TYPE_CHECKING:
    from lowtide.models.ldm4ts.model import LDM4TSModel

__all__ = ["LDM4TSConfig", "LDM4TSModel"]

FAMILY = ModelFamily(name=NAME, command="lowtide forecast DATA -m FOLDER")


def __getattr__(name: str) -> Any:
    if name != "LDM4TSModel":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lowtide.models.ldm4ts.model import LDM4TSModel

    return LDM4TSModel
