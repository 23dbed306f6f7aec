"""Latents of clips in .safetensors files, with what is needed to make a video of them again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from lowtide.core.atomic_file import atomic_output
from lowtide.core.errors import InputError
from lowtide.core.input_file import require_input
from lowtide.jobs.vae.clip_facts import ClipFacts
from lowtide.models.lowtide_files import read_metadata, read_tensors

if TYPE_CHECKING:
    from torch import Tensor

KEY, _ENTRY = "latents", "lowtide.clip"


def write_latents(path: Path, latents: Tensor, facts: ClipFacts, *, replace: bool) -> None:
    """Write latents (1, C, n, h, w) under the key ``latents``.

    Raises:
        OutputError: The file cannot be written.
    """
    from safetensors.torch import save_file

    with atomic_output(path, replace=replace) as part:
        save_file({KEY: latents.cpu().contiguous()}, part, {_ENTRY: facts.model_dump_json()})


def read_latents(path: Path) -> tuple[Tensor, ClipFacts | None]:
    """Read latents (1, C, n, h, w) and what the file says of them, if it was written here.

    Raises:
        InputError: There are none, of more than one clip, or with values that are not finite.
        ModelError: It is no .safetensors file.
    """
    import torch

    require_input(path)
    entries = read_metadata(path)
    names, found = _stored_latents(path)
    if found is None:
        raise InputError(
            f"{path} holds no tensor {KEY!r}, only {', '.join(names[:3]) or 'nothing'}"
        )
    latents = found
    if latents.dim() == 4:
        latents = latents.unsqueeze(0)
    shape = "×".join(map(str, latents.shape))
    if latents.dim() != 5 or 0 in latents.shape or not latents.is_floating_point():
        raise InputError(
            f"{path}: latents are (1, channels, number, height, width) of floating point, not"
            f" {latents.dtype} {shape}"
        )
    if len(latents) != 1:
        raise InputError(
            f"{path} holds the latents of {len(latents)} clips ({shape}), and a video is one",
            hint="save each clip in a file of its own",
        )
    if not torch.isfinite(latents).all():
        raise InputError(f"{path}: latents are not finite (NaN or infinity)")
    return latents.float(), _facts(path, entries)


def _stored_latents(path: Path) -> tuple[list[str], Tensor | None]:
    """Return the names of a file's tensors, and its latents."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            return names, file.get_tensor(KEY) if KEY in names else None
    except SafetensorError:  # metadata that are not all text
        tensors = read_tensors(path)
        return list(tensors), tensors.get(KEY)


def _facts(path: Path, entries: dict[str, str]) -> ClipFacts | None:
    if (text := entries.get(_ENTRY)) is None:
        return None
    try:
        facts = ClipFacts.model_validate_json(text)
    except ValidationError as error:
        one = error.errors()[0]
        where = ".".join(map(str, one["loc"]))
        raise InputError(
            f"{path}: what it says of its clip is wrong: {where}: {one['msg']}"
        ) from error
    if len(facts.stamps) != facts.frames or any(
        later <= earlier for earlier, later in zip(facts.stamps, facts.stamps[1:], strict=False)
    ):
        raise InputError(f"{path}: its {len(facts.stamps)} stamps are not those of its frames")
    return facts
