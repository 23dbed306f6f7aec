"""Command `lowtide plan vae`: predict a video autoencoder on a GPU that need not be here."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from lowtide.cli.shell import JsonReport, handle_errors, option, print_result

_DEVICE = "Device"


@handle_errors
def vae(
    model: Annotated[
        str,
        option(
            "-m",
            "--model",
            panel="Main",
            metavar="NAME",
            help=(
                "A class, such as AutoencoderKLWan, or VideoVAE for SeedVR2's, in full size; a"
                " folder of diffusers or of Lowtide; or SeedVR2's .safetensors file. Weights are"
                " not needed for a class."
            ),
        ),
    ],
    size: Annotated[
        str,
        option("--size", panel="Main", metavar="WxH", help="Size of the frames: 1280x720."),
    ],
    frames: Annotated[int, option("--frames", panel="Main", help="Number of frames.")],
    part: Annotated[
        Literal["both", "encoder", "decoder"],
        option("--part", panel="Main", help="Part to plan."),
    ] = "both",
    device: Annotated[
        str,
        option(
            "--device",
            panel=_DEVICE,
            help=(
                "A GPU by name, such as rtx3060-12gb, which need not be present; or cuda:0, ... of"
                " this machine."
            ),
        ),
    ] = "cuda",
    budget: Annotated[
        str,
        option(
            "-b",
            "--budget",
            panel=_DEVICE,
            help="Memory of the process on the GPU: 6GiB, 80%, or auto.",
        ),
    ] = "auto",
    precision: Annotated[
        Literal["auto", "bf16", "fp16", "fp32"],
        option("--precision", panel=_DEVICE, help="auto is bf16 where the GPU has it, else fp16."),
    ] = "auto",
    as_json: JsonReport = False,
) -> None:
    """Predict what encoding and decoding a clip would take on a GPU.

    Which order of chunks, where their state is, memory of the GPU and of the host, scratch files,
    and bytes moved a frame. Nothing is computed: no GPU, weights, video or latents are needed.
    """
    from lowtide.jobs.vae.plan import plan_vae

    plan = plan_vae(
        model,
        size=size,
        frames=frames,
        device=device,
        budget=budget,
        precision=precision,
        part=part,
    )
    # The plan is printed even if nothing fits, which is an error.
    print_result(plan, lambda: typer.echo(str(plan)), plan.require, as_json=as_json)
