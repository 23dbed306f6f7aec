"""The encoder or decoder of a video autoencoder, as modules of single chunks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from lowtide.core.errors import UsageError
from lowtide.memory.budget import Budget
from lowtide.memory.profiles import DeviceProfile
from lowtide.streaming.chunk_stream import ChunkStream
from lowtide.streaming.clip_plan import AfterChunks
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
        refuses_rest: Whether a clip with such frames is refused, as the library's own call fails.
    """

    first: nn.Module
    later: nn.Module
    frames: tuple[int, int]
    drops_rest: bool = False
    refuses_rest: bool = False

    def stream(
        self,
        *,
        budget: str | int | Budget = "auto",
        pages: PagePlacement = "auto",
        scratch: Path | None = None,
        profile: DeviceProfile | None = None,
    ) -> ClipPartStream:
        """Return the stream of the part. Settings are those of `ChunkStream`."""
        chunks = ChunkStream(
            self.first,
            self.later,
            frames=self.frames,
            budget=budget,
            pages=pages,
            scratch=scratch,
            profile=profile,
        )
        return ClipPartStream(chunks, self)


@dataclass(frozen=True)
class ClipPartStream:
    """A part of a video autoencoder that runs in chunks of frames and bands of rows."""

    chunks: ChunkStream
    part: ClipPart

    def __call__(self, clip: Tensor, after_chunks: AfterChunks | None = None) -> Tensor:
        """Map (B, C, T, H, W) to (B, C', T', H', W') as the library's own call does.

        ``after_chunks`` is that of `ChunkStream`.

        Raises `UsageError` for a number of frames that the library's own call cannot take.
        """
        return self.chunks(self._taken(clip), after_chunks)

    def _taken(self, clip: Tensor) -> Tensor:
        """Return the frames of a clip that the library's own call takes."""
        first, later = self.part.frames
        count = clip.shape[_FRAMES] if clip.dim() > _FRAMES else first
        rest = max(0, count - first) % later
        if rest and self.part.refuses_rest:
            raise UsageError(
                f"a clip of {count} frames cannot be encoded: they are {first}, or {first} and"
                f" {later} for each latent",
                hint=f"repeat the last frame {later - rest} times, or cut {rest} frames off",
            )
        if rest and self.part.drops_rest:
            clip = clip.narrow(_FRAMES, 0, count - rest)
        return clip
