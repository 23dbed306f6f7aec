"""Command `lowtide plan vae`: predict a video autoencoder on a GPU that need not be here."""

from __future__ import annotations

from typing import Any

import typer

from lowtide.cli.common_options import JsonReport
from lowtide.cli.settings_options import with_settings
from lowtide.cli.shell import print_result, report_errors
from lowtide.jobs.vae.settings import VaePlanSettings


@report_errors
@with_settings(VaePlanSettings)
def vae(as_json: JsonReport = False, **settings: Any) -> None:
    """Predict what encoding and decoding a clip would take on a GPU.

    Which order of chunks, where their state is, memory of the GPU and of the host, scratch files,
    and bytes moved a frame. Nothing is computed: no GPU, weights, video or latents are needed.
    """
    from lowtide.jobs.vae.plan import plan_vae

    plan = plan_vae(**settings)
    # The plan is printed even if nothing fits, which is an error.
    print_result(plan, lambda: typer.echo(str(plan)), plan.require, as_json=as_json)
