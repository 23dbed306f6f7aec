"""Rotary position over two axes."""

from __future__ import annotations

import torch
from torch import Tensor

from lowtide.attention.spatial.position import (
    Position,
    RotaryAngles,
    heads_first_view,
    to_heads_first,
)
from lowtide.core.errors import UsageError


class Rope2d(Position):
    """Rotary position: one half of a head's channels turns with the row, the other with the
    column (RoPE, arXiv 2104.09864; two axes as in arXiv 2403.13298).

    Scores then depend on distances without a mask, so every kernel takes it. The slowest channel
    turns by about one radian within ``period`` pixels.
    """

    rotates = True

    def __init__(self, head_dim: int, period: float = 100.0) -> None:
        super().__init__()
        if head_dim % 4:
            raise UsageError(
                f"rotary position needs heads of a multiple of 4 channels, not {head_dim}",
                hint="other heads, or position='decomposed'",
            )
        self.alike = head_dim, period
        pairs = head_dim // 4
        self._speeds = [period ** -(pair / pairs) for pair in range(pairs)]

    def turns(self, rows: Tensor, columns: Tensor, dtype: torch.dtype) -> Tensor:
        """Cosine and sine of each pair of channels: (..., rows, columns, 1, dim / 2, 2)."""
        down = self._angles(rows)[..., :, None, :]
        right = self._angles(columns)[..., None, :, :]
        down, right = (torch.stack([angle.cos(), angle.sin()], -1) for angle in (down, right))
        exact = torch.promote_types(dtype, torch.float32)
        both = torch.broadcast_tensors(down.to(exact), right.to(exact))
        return torch.cat(both, -2).unsqueeze(-3)

    def rotate(self, tensor: Tensor, turns: Tensor | None) -> Tensor:
        """The rotated tensor in its own precision; computed in fp32 at least."""
        assert turns is not None
        pairs = tensor.to(turns.dtype).unflatten(-1, (-1, 2))
        if torch.compiler.is_exporting():
            return self._turned(pairs, turns).flatten(-2).to(tensor.dtype)
        # As complex numbers it is one pass over memory.
        turned = torch.view_as_complex(pairs) * torch.view_as_complex(turns)
        return torch.view_as_real(turned).flatten(-2).to(tensor.dtype)

    def strip_turns(self, rows: Tensor, columns: Tensor, dtype: torch.dtype) -> RotaryAngles:
        """Each along its own axis; what does not turn with it is 1, which changes no number."""
        exact = torch.promote_types(dtype, torch.float32).to_complex()
        angles = self._angles(rows), self._angles(columns)
        down, right = (torch.polar(torch.ones_like(one), one).to(exact) for one in angles)
        # The backward pass keeps what turned a tensor, so that all strips share one.
        at_once = torch.is_grad_enabled() or dtype not in (torch.float32, torch.float64)
        return RotaryAngles(
            torch.cat([down, torch.ones_like(down)], -1),
            torch.cat([torch.ones_like(right), right], -1),
            self.turns(rows, columns, dtype) if at_once else None,
        )

    def by_head(self, tensor: Tensor, turns: RotaryAngles | None) -> Tensor:
        """The same; where no gradient is recorded by two passes over memory, and no copy."""
        assert turns is not None
        if turns.whole is not None:
            return to_heads_first(self.rotate(tensor, turns.whole))
        ordered = heads_first_view(tensor)
        result = tensor.new_empty(ordered.shape)
        pairs, whole = (
            torch.view_as_complex(one.unflatten(-1, (-1, 2))) for one in (ordered, result)
        )
        torch.mul(pairs, turns.down, out=whole)
        whole.mul_(turns.right[:, None])
        return result

    def _angles(self, positions: Tensor) -> Tensor:
        """By how much each pair of channels turns at these positions, (..., pairs); in fp64: in
        fp32 an angle at pixel 8192 is off by 5e-4."""
        speeds = torch.tensor(self._speeds, dtype=torch.float64, device=positions.device)
        return positions[..., None].double() * speeds

    @staticmethod
    def _turned(pairs: Tensor, turns: Tensor) -> Tensor:
        """The same with real numbers, for runtimes that have no others."""
        (first, second), (cosine, sine) = pairs.unbind(-1), turns.unbind(-1)
        return torch.stack([first * cosine - second * sine, first * sine + second * cosine], -1)
