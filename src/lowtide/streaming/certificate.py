"""Comparison of a streamed program with its model on small images."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from lowtide.core.errors import ModelError
from lowtide.memory.cache import package_digest, write_cached
from lowtide.streaming.capture.autocast_state import AutocastState, no_autocast
from lowtide.streaming.capture.export_graph import capture
from lowtide.streaming.capture.output_container import unpack_output
from lowtide.streaming.engine.cut_points import CutPoints
from lowtide.streaming.engine.executor import BandExecutor
from lowtide.streaming.engine.placement import memory_page_factory
from lowtide.streaming.engine.program import StreamProgram, lower_to_rows
from lowtide.streaming.engine.segments import cut_segments
from lowtide.streaming.module_fingerprint import MODULE_ATTRIBUTES
from lowtide.streaming.pages.page import MemoryPage
from lowtide.streaming.tolerance import tolerance

# Small sides have the same remainder as the real ones, so that a model pads by the same amount. The
# second size is for models with a special case at their training size.
_REST, _LEAST = 64, (64, 128)
# Models that upscale by more are compared on a smaller image: their results would have more than
# 256 rows, and an autoencoder's decoder, which upscales by 8, would run at its real size.
_MAX_SCALE = 4
# Allowed error of bands as a multiple of the model's own 16-bit error, where that error is large.
_ERROR_FACTOR = 2
_FP32_HINT = (
    "run it in fp32: module.float(); an autoencoder of diffusers by .to(torch.float32), and its"
    " pipeline converts what it decodes if vae.config.force_upcast is set"
)
# Segments of the program and bands of each to try: two choices with little in common.
_TRIED = (1, 3), (6, 5)


@dataclass(frozen=True)
class Certificate:
    """Measured error of a streamed program against its model.

    Attributes:
        error: Largest difference from the model itself, divided by its largest absolute value.
            Where 16-bit types leave more than rounding should, the error against the model in fp32.
        own_error: In that case, the model's own error against fp32.
        operators: Digest of the operators in order, which the program of the real size must share.
    """

    error: float
    operators: str
    own_error: float | None = None

    def holds(self, allowed: float) -> bool:
        """Return whether the error is within ``allowed``, the tolerance for rounding."""
        return self.error <= (allowed if self.own_error is None else _ERROR_FACTOR * self.own_error)


def certify(
    module: nn.Module, image: Tensor, program: StreamProgram, folder: Path | None
) -> Certificate:
    """Compare ``module`` run in bands with ``module`` itself, on a small image.

    The outcome is cached in ``folder``, keyed by weights, remainders of the sizes, and versions.

    Args:
        module: The module to compare with.
        image: Gives size, dtype and device; the small image is like it.
        program: The program for the real size.
        folder: Cache folder, or None.

    Raises:
        ModelError: The two differ by more than rounding, or the model runs other operators at
            another size.
    """
    wanted = program.operators_digest
    allowed = tolerance(node.meta.dtype for node in program.graph.nodes)
    scale = program.rows[program.output].size / image.shape[2]
    shares = [int(least * min(1, _MAX_SCALE / scale)) for least in _LEAST]
    for height, width in ([_small(side, least) for side in image.shape[2:]] for least in shares):
        found = _certify_cached(module, image, height, width, wanted, folder, allowed)
        if not found.holds(allowed):
            raise ModelError(
                f"bands of this model differ from the whole result by {found.error:.1e} of its"
                " range",
                hint="run it whole or in tiles",
            )
        if found.operators == wanted:
            return found
    raise ModelError(
        f"at {image.shape[3]}×{image.shape[2]} this model runs other operators than at the smaller"
        " sizes at which its bands were compared"
    )


def _certify_cached(
    module: nn.Module,
    image: Tensor,
    height: int,
    width: int,
    expected_operators: str,
    folder: Path | None,
    allowed: float,
) -> Certificate:
    key = module_key(module, image, height, width, expected_operators)
    path = None if folder is None else folder / f"certificate-{key}.json"
    found = _read_cached(path)
    if found is None:
        with tf32(False):
            found = _measure(module, image, height, width, allowed)
        if path is not None:
            write_cached(path, json.dumps(asdict(found)))
    return found


def _small(side: int, least: int) -> int:
    return min(side, least + side % _REST)


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Context manager: allow or forbid TF32 in matrix products and convolutions.

    TF32 rounding depends on the kernel chosen for a size, and hides errors of bands.
    """
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    before = tf32_is_allowed()
    try:
        products.allow_tf32 = allowed
        convolutions.allow_tf32 = allowed  # pyright: ignore[reportAttributeAccessIssue]
        yield
    finally:
        products.allow_tf32 = before[0]
        convolutions.allow_tf32 = before[1]  # pyright: ignore[reportAttributeAccessIssue]


def tf32_is_allowed() -> tuple[bool, bool]:
    """Return whether TF32 is allowed in (matrix products, convolutions)."""
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    allowed = convolutions.allow_tf32  # pyright: ignore[reportAttributeAccessIssue]
    return bool(products.allow_tf32), bool(allowed)


def _measure(
    module: nn.Module, image: Tensor, height: int, width: int, allowed: float
) -> Certificate:
    small = small_image(image, height, width)
    program = lower_to_rows(capture(module, small))
    with torch.inference_mode():
        whole, _ = unpack_output(module(small.clone()))
    if not whole.isfinite().all():
        raise ModelError(
            f"this model returns NaN or infinity for random input in {image.dtype}, so its bands"
            " cannot be compared",
            hint=None if image.dtype == torch.float32 else _FP32_HINT,
        )
    results = []
    cutter = CutPoints(program)
    for parts, bands in _TRIED:
        segments = cut_segments(program, cutter.cuts(parts))
        pages = memory_page_factory(program, small.device)
        executor = BandExecutor(program, segments, [bands] * len(segments), pages)
        dim = program.rows[program.output].dim
        results.append(
            torch.cat([rows for _, rows in executor.run(MemoryPage.from_tensor(small, 2))], dim)
        )
    error = max(relative_error(result, whole) for result in results)
    types = {image.dtype, *(node.meta.dtype for node in program.graph.nodes)}
    if error <= allowed or not types & {torch.bfloat16, torch.float16}:
        return Certificate(error, program.operators_digest)
    exact = _in_fp32(module, small)
    error = max(relative_error(result, exact) for result in results)
    return Certificate(error, program.operators_digest, relative_error(whole, exact))


def small_image(like: Tensor, height: int, width: int) -> Tensor:
    """Return random values in 0..1 of another size, otherwise like ``like``."""
    generator = torch.Generator().manual_seed(0)
    small = torch.rand(*like.shape[:2], height, width, generator=generator)
    return small.to(like.device, like.dtype).contiguous(memory_format=memory_format_of(like))


def _in_fp32(module: nn.Module, image: Tensor) -> Tensor:
    """Return the model's result in fp32; needs a second set of weights."""
    weights = {
        name: tensor.detach().float() if tensor.is_floating_point() else tensor.detach()
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    }
    with torch.inference_mode(), no_autocast(image.device.type):
        return unpack_output(torch.func.functional_call(module, weights, (image.float(),)))[0]


def memory_format_of(image: Tensor) -> torch.memory_format:
    """Return the memory format of an image, which decides the copies a model makes."""
    if image.is_contiguous() or not image.is_contiguous(memory_format=torch.channels_last):
        return torch.contiguous_format
    return torch.channels_last


def relative_error(result: Tensor, whole: Tensor) -> float:
    """Return the largest difference, relative to the largest value of ``whole``."""
    if result.shape != whole.shape:
        return float("inf")
    apart = (result.double() - whole.double()).abs().max().item()
    # Written so that a NaN difference counts as infinite.
    return apart / max(whole.abs().max().item(), 1e-30) if apart >= 0 else float("inf")


def _read_cached(path: Path | None) -> Certificate | None:
    if path is None or not path.is_file():
        return None
    try:
        return Certificate(**json.loads(path.read_text()))
    except (ValueError, TypeError):
        return None  # damaged or of another version: compare again and replace it


def module_key(
    module: nn.Module, image: Tensor, height: int, width: int, expected_operators: str = ""
) -> str:
    """Return the cache key of facts about a module: weights, sizes, versions."""
    digest = hashlib.sha256()
    # Operators are part of the key: class name and weights do not determine what a module computes.
    facts = (
        type(module).__qualname__,
        repr(module),
        str(image.dtype),
        image.device.type,
        str(memory_format_of(image)),
        (*image.shape[:2], height, width),
        str(torch.__version__),
        package_digest(),
        expected_operators,
        AutocastState.current(image.device.type),
        torch.get_default_dtype(),
        *_settings(module),
    )
    digest.update(repr(facts).encode())
    for name, tensor in module.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()[:24]


def _settings(module: nn.Module) -> Iterator[str]:
    """Yield submodule attributes that are numbers, strings or containers of these."""
    for name, part in module.named_modules():
        for key, value in vars(part).items():
            if key not in MODULE_ATTRIBUTES and isinstance(
                value, (bool, int, float, str, tuple, list)
            ):
                yield f"{name}.{key}={value!r}"
