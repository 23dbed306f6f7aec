"""Command `lowtide models`: list bundled models and describe model files."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from lowtide.cli.shell import handle_errors
from lowtide.core.schema import SCHEMA_VERSION
from lowtide.core.units import format_bytes

if TYPE_CHECKING:
    from lowtide.models import ModelDescriptor


@handle_errors
def models(
    files: Annotated[
        list[str] | None,
        typer.Argument(help="Model files or bundled names to describe. Default: all bundled ones."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON on stdout.")] = False,
) -> None:
    """List the bundled models, or describe model files."""
    from lowtide.models import describe, load, names

    found = [load(file).descriptor for file in files] if files else [describe(n) for n in names()]
    if as_json:
        rows = [model.to_dict() for model in found]
        typer.echo(json.dumps({"schema_version": SCHEMA_VERSION, "models": rows}, indent=2))
        return
    for model in found:
        _print(model)


def _print(model: ModelDescriptor) -> None:
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
        "weights": f"{model.parameters:,} parameters, {format_bytes(model.weight_bytes)}",
        "channels": f"{model.in_channels} in, {model.out_channels} out",
        "sizes": ", ".join(sizes) + " (others are padded)" if sizes else "any",
        "precision": ", ".join(["fp32", *low]),
        "tiling": model.tiling,
        "license": model.license or "not stated in the file",
        "sha256": model.sha256,
    }
    if model.tags:
        rows["tags"] = ", ".join(model.tags)
    for name, text in rows.items():
        typer.echo(f"  {name:<10} {text}")
