"""Command `lowtide models`: list bundled models and describe model files."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from lowtide.cli.shell import report_errors
from lowtide.core.schema import SCHEMA_VERSION
from lowtide.core.units import format_bytes

if TYPE_CHECKING:
    from lowtide.models import ModelDescriptor


@report_errors
def models(
    files: Annotated[
        list[str] | None,
        typer.Argument(help="Model files or bundled names to describe. Default: all bundled ones."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON on stdout.")] = False,
) -> None:
    """List the bundled models, what for and how fast, or describe model files."""
    from lowtide.models import bundled_names, describe_bundled, load
    from lowtide.models.bundled import (
        PUBLISHED,
        bundled_use,
        measured_speeds,
        seconds_per_megapixel,
    )

    found = (
        [load(file).descriptor for file in files]
        if files
        else [describe_bundled(n) for n in bundled_names()]
    )
    if as_json:
        rows = [
            model.to_dict()
            | {
                "use": bundled_use(model.name),
                "cpu_seconds_per_megapixel": seconds_per_megapixel(model.name),
            }
            for model in found
        ]
        shown = {
            "schema_version": SCHEMA_VERSION,
            "models": rows,
            "speed_measured_on": measured_speeds()["cpu"],
        }
        shown["published"] = [asdict(one) for one in PUBLISHED]
        typer.echo(json.dumps(shown, indent=2))
        return
    for model in found:
        _print(model, bundled_use(model.name), seconds_per_megapixel(model.name))
    if files:
        return
    typer.echo(f"speeds are of one thread of {measured_speeds()['cpu']}, for a megapixel of input")
    typer.echo("models of others that run here, which are not downloaded:")
    for one in PUBLISHED:
        typer.echo(f"  {one.subject}: {one.name}, {one.license}, {one.page}")


def _print(model: ModelDescriptor, use: str, seconds: float | None) -> None:
    rule = model.size
    sizes = [f"at least {rule.minimum} px"] if rule.minimum else []
    sizes += [f"multiples of {rule.multiple_of}"] if rule.multiple_of > 1 else []
    sizes += ["square"] if rule.square else []
    low = [
        name
        for name, ok in (("bf16", model.supports_bfloat16), ("fp16", model.supports_half))
        if ok
    ]
    typer.echo(f"{model.name}: {model.architecture} ×{model.scale}, {model.purpose}")
    rows = {
        "use": use,
        "speed": f"{seconds:.3g} s of CPU time a megapixel" if seconds else "",
        "weights": f"{model.parameters:,} parameters, {format_bytes(model.weight_bytes)}",
        "channels": f"{model.in_channels} in, {model.out_channels} out",
        "sizes": ", ".join(sizes) + " (others are padded)" if sizes else "any",
        "precision": ", ".join(["fp32", *low]),
        "tiling": model.tiling,
        "license": model.license or "not stated in the file",
        "sha256": model.sha256,
    }
    rows["tags"] = ", ".join(model.tags)
    for name, text in rows.items():
        if text:
            typer.echo(f"  {name:<10} {text}")
