"""Command `lowtide doctor`: describe this machine."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from lowtide.cli.shell import report_errors
from lowtide.core.units import format_bytes


@report_errors
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON on stdout.")] = False,
) -> None:
    """Show versions, devices, half-precision speed, extras and attention backends."""
    from lowtide.jobs.doctor import examine_machine

    facts = examine_machine()
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    versions = ", ".join(f"{name} {value}" for name, value in facts["versions"].items())
    _rows("system", [facts["system"], versions])
    _rows("devices", [_device(device) for device in facts["devices"]])
    _rows("precision", [_precision(one) for one in facts["half_precision_on_cpu"]])
    _rows(
        "disk",
        [
            f"{format_bytes(facts['disk_free_bytes'])} free here",
            f"measurements are cached in {facts['cache_folder'] or 'no folder: there is no home'}",
        ],
    )
    _rows("extras", [_state(e["name"], e["complete"], "", e["fix"]) for e in facts["extras"]])
    _rows(
        "attention",
        [_state(b["name"], b["available"], b["reason"], b["fix"]) for b in facts["attention"]],
    )


def _rows(title: str, lines: list[str]) -> None:
    for index, line in enumerate(lines):
        typer.echo(f"{title if not index else '':<10} {line}")


def _device(device: dict[str, Any]) -> str:
    total = f" of {format_bytes(device['total_bytes'])}" if "total_bytes" in device else ""
    free = f"{format_bytes(device['free_bytes'])}{total} free"
    return f"{device['name']}: {device['description']}, {free}"


def _precision(one: dict[str, Any]) -> str:
    return (
        f"{one['name']} on the CPU: linear layers take {one['linear']:.2g}, convolutions"
        f" {one['convolution']:.2g} times as long as in fp32"
    )


def _state(name: str, good: bool, reason: str, fix: str) -> str:
    parts = [part for part in (reason, fix) if part]
    return f"{'yes' if good else 'no':<4}{name:<16}{'; '.join(parts)}".rstrip()
