"""2D rotary position embedding (RoPE)."""

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
    """2D rotary position embedding, axial: half of the channels per axis.

    One half of a head's channels rotates with the row, the other with the column (RoPE, arXiv
    2104.09864; two axes as in arXiv 2403.13298). Scores then depend on distances without a mask, so
    every kernel supports it. The slowest channel rotates by about one radian within ``period``
    pixels. Raises `UsageError` for a head dim that is no multiple of 4.
    """

    rotates = True

    def __init__(self, head_dim: int, period: float = 100.0) -> None:
        super().__init__()
        if head_dim % 4:
            raise UsageError(
                f"rotary position needs a head dimension that is a multiple of 4, not {head_dim}",
                hint="another number of heads, or position='decomposed'",
            )
        self.rotation_key = head_dim, period
        pairs = head_dim // 4
        self._frequencies = [period ** -(pair / pairs) for pair in range(pairs)]

    def rotary_factors(self, rows: Tensor, columns: Tensor, dtype: torch.dtype) -> Tensor:
        """Return cosine and sine per pair of channels.

        (..., rows, columns, 1, head dim / 2, 2) for positions (..., rows) and (..., columns), in at
        least fp32.
        """
        down = self._angles(rows)[..., :, None, :]
        right = self._angles(columns)[..., None, :, :]
        down, right = (torch.stack([angle.cos(), angle.sin()], -1) for angle in (down, right))
        exact = torch.promote_types(dtype, torch.float32)
        both = torch.broadcast_tensors(down.to(exact), right.to(exact))
        return torch.cat(both, -2).unsqueeze(-3)

    def rotate(self, tensor: Tensor, factors: Tensor | None) -> Tensor:
        """Rotate (..., rows, columns, heads, head dim) in at least fp32.

        The result has the dtype and shape of ``tensor``.
        """
        assert factors is not None
        pairs = tensor.to(factors.dtype).unflatten(-1, (-1, 2))
        if torch.compiler.is_exporting():
            return self._rotate_real(pairs, factors).flatten(-2).to(tensor.dtype)
        # Complex multiplication is one pass over memory.
        turned = torch.view_as_complex(pairs) * torch.view_as_complex(factors)
        return torch.view_as_real(turned).flatten(-2).to(tensor.dtype)

    def separable_factors(self, rows: Tensor, columns: Tensor, dtype: torch.dtype) -> RotaryAngles:
        """Return the factors along each axis, for positions (rows,) and (columns,).

        Channels of the other axis have factor 1, which changes no value.
        """
        exact = torch.promote_types(dtype, torch.float32).to_complex()
        angles = self._angles(rows), self._angles(columns)
        down, right = (torch.polar(torch.ones_like(one), one).to(exact) for one in angles)
        # Autograd saves the factors, so that all rows of windows share one tensor.
        at_once = torch.is_grad_enabled() or dtype not in (torch.float32, torch.float64)
        return RotaryAngles(
            torch.cat([down, torch.ones_like(down)], -1),
            torch.cat([torch.ones_like(right), right], -1),
            self.rotary_factors(rows, columns, dtype) if at_once else None,
        )

    def rotate_heads_first(self, tensor: Tensor, factors: RotaryAngles | None) -> Tensor:
        """Rotate, and permute to (B, heads, columns, rows, head dim).

        Without gradients in two passes over memory, and no copy.
        """
        assert factors is not None
        if factors.product is not None:
            return to_heads_first(self.rotate(tensor, factors.product))
        ordered = heads_first_view(tensor)
        result = tensor.new_empty(ordered.shape)
        pairs, whole = (
            torch.view_as_complex(one.unflatten(-1, (-1, 2))) for one in (ordered, result)
        )
        torch.mul(pairs, factors.down, out=whole)
        whole.mul_(factors.right[:, None])
        return result

    def _angles(self, positions: Tensor) -> Tensor:
        """Return the angle of each pair of channels at these positions, (..., pairs).

        In fp64: in fp32 an angle at pixel 8192 is off by 5e-4.
        """
        speeds = torch.tensor(self._frequencies, dtype=torch.float64, device=positions.device)
        return positions[..., None].double() * speeds

    @staticmethod
    def _rotate_real(pairs: Tensor, factors: Tensor) -> Tensor:
        """Rotate with real numbers, for runtimes without complex ones."""
        (first, second), (cosine, sine) = pairs.unbind(-1), factors.unbind(-1)
        return torch.stack([first * cosine - second * sine, first * sine + second * cosine], -1)
