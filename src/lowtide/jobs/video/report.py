"""Reports of video jobs as plain data."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from lowtide.core.errors import VideoError
from lowtide.core.units import format_seconds
from lowtide.jobs.engine.report import JobReport
from lowtide.jobs.images.report import NoisyImageReport


class StreamReport(BaseModel):
    """A stream of the input, and what became of it in the output."""

    index: int
    kind: str
    codec: str
    action: Literal["enlarged", "copied", "encoded", "converted", "dropped"]
    into: str = ""
    reason: str = ""
    text: str = ""


class VideoReport(NoisyImageReport):
    """Result of one video: that of an image, for its frames, and what became of the rest.

    ``plan`` is for one frame, and ``plan_seconds`` for all that are due. ``frames_in`` counts the
    frames that were asked for, of which ``frames_resumed`` come from a run that was stopped, and
    ``frames_repeated`` could not be decoded. ``fps`` is the speed of this run. ``seconds_in`` is 0
    of images without ``--fps``. The noise is that of the first frames, where it was removed.
    """

    noun = "video"

    seconds_in: float = 0.0
    frames_in: int = 0
    frames_out: int = 0
    frames_resumed: int = 0
    frames_repeated: int = 0
    fps: float | None = None
    plan_seconds: float = 0.0
    encoder: str = ""
    pixel_format: str = ""
    streams: list[StreamReport] = Field(default=[])

    @property
    def pace(self) -> str:
        """Speed of the run, for texts."""
        return "resumed only" if self.fps is None else f"{self.fps:.3g} frames a second"

    def details(self) -> list[tuple[str, str]]:
        """Return the frames, the encoder and the streams."""
        count = f"{self.frames_in:,} frames"
        if self.seconds_in:
            count += f" over {format_seconds(self.seconds_in)}"
        if self.status == "done":
            count += f", {self.frames_out:,} written"
        if self.frames_resumed:
            count += f", {self.frames_resumed:,} of them from a run that was stopped"
        if self.status == "planned":
            count += f", in about {format_seconds(self.plan_seconds)}"
        rows = [("frames", count), ("encoder", f"{self.encoder}, {self.pixel_format}")]
        where = "; of the first frames, and taken for all" * (self.sigma_source == "estimated")
        rows += [(name, text + where) for name, text in super().details()]
        return rows + [("stream", one.text) for one in self.streams]


class VideosReport(JobReport):
    """Report of a job that upscales videos."""

    item_type = VideoReport
    noun = "videos"
    input_error = VideoError

    videos: list[VideoReport] = Field(default=[])
