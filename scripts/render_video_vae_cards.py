"""The table of full-size video autoencoders on GPUs; see ``render_results.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tables import NONE, Rows, table

from lowtide.core.units import format_bytes

_PLACES = {"memory": "GPU", "host": "host", "disk": "disk"}
_HEAD = ["model, frames", "GPU", "part", "chunks", "state", "peak", "host", "disk"]
_HEAD += ["moved a frame", "seconds a frame"]


def video_vae_cards(rows: Rows) -> str:
    """Each part of each model, by size of the frames and GPU."""
    return table(_HEAD, [_cells(row, part) for row in rows for part in row["parts"]])


def _cells(row: dict[str, Any], part: dict[str, Any]) -> list[str]:
    model, size, _ = row["row"].split(", ")
    lead = [f"{model}, {size}", row["device_title"].removeprefix("NVIDIA GeForce "), part["part"]]
    if part["refusal"] is not None:
        least = part["smallest_bytes"]
        needs = NONE if least is None else f"fits from {format_bytes(least)} on"
        return [*lead, "none fits", NONE, needs, *(NONE for _ in range(4))]
    together, state = part["together"], part["state"]
    order = "one by one" if together == 1 else f"{together} in each band"
    kept = f"{format_bytes(part['state_bytes'])}, {_PLACES[state]}" if state else NONE
    sizes = [part[name] for name in ("peak_bytes", "host_bytes", "disk_bytes")]
    sizes.append(part["moved_bytes_per_frame"])
    shown = [format_bytes(one) if one else NONE for one in sizes]
    return [*lead, order, kept, *shown, f"{part['seconds_per_frame']:.2g}"]


SHAPES: dict[str, Callable[[Rows], str]] = {"video_vae_cards": video_vae_cards}
