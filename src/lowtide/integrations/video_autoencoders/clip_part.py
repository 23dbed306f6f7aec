"""The encoder or decoder of a video autoencoder, as modules of single chunks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from lowtide.memory.budget import Budget
from lowtide.streaming.chunk_stream import ChunkStream
from lowtide.streaming.engine.placement import PagePlacement

# Dim of frames in (B, C, T, H, W).
_FRAMES = 2


@dataclass(frozen=True)
class ClipPart:
    """Encoder or decoder of clips: see `ChunkStream` for ``first``, ``later`` and ``frames``.

    Attributes:
        first: Module of the first chunk.
        later: Module of each later chunk.
        frames: Input frames of the first chunk and of each later one.
        drops_rest: Whether frames after the last full chunk are left out, as the library's own call
            does. Otherwise the first chunk takes them too.
    """

    first: nn.Module
    later: nn.Module
    frames: tuple[int, int]
    drops_rest: bool = False

    def stream(
        self,
        *,
        budget: str | int | Budget = "auto",
        pages: PagePlacement = "auto",
        scratch: Path | None = None,
    ) -> ClipPartStream:
        """Return the stream of the part. Settings are those of `lowtide.stream`."""
        chunks = ChunkStream(
            self.first,
            self.later,
            frames=self.frames,
            budget=budget,
            pages=pages,
            scratch=scratch,
        )
        return ClipPartStream(chunks, self)


@dataclass(frozen=True)
class ClipPartStream:
    """A part of a video autoencoder that runs in chunks of frames and bands of rows."""

    chunks: ChunkStream
    part: ClipPart

    def __call__(self, clip: Tensor) -> Tensor:
        """Map (B, C, T, H, W) to (B, C', T', H', W') as the library's own call does."""
        first, later = self.part.frames
        if self.part.drops_rest and clip.dim() > _FRAMES and clip.shape[_FRAMES] > first:
            count = clip.shape[_FRAMES]
            clip = clip.narrow(_FRAMES, 0, count - (count - first) % later)
        return self.chunks(clip)
