"""Command `lowtide plan video`: dry run for this machine or another device.

Takes the options of `lowtide video`.
"""

from __future__ import annotations

from functools import partial

from lowtide.cli import video as command
from lowtide.cli.plan_command import plan_command

plan = plan_command(
    partial(command.video, dry_run=True),
    command.video,
    "Predict what upscaling a video would do and use: reads packets, decodes one frame, writes"
    " nothing.",
)
