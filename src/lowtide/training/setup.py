"""What a training configuration sets: networks, accelerator, optimizers, formats, and schedules.

Schedules are by step: learning rate, loss weights, and the decay of the average of the weights.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.core.errors import ModelError, UsageError, hint_for_name, install_extra
from lowtide.core.units import format_bytes
from lowtide.memory.process_memory import available_host_bytes
from lowtide.models import lowtide_files
from lowtide.models.build_limits import BuildLimitsMode, NetworkTooLargeError
from lowtide.models.families import Role, network_builders
from lowtide.training.run_config import LossEntry, OptimSection, RunConfig, SchedulerSection

# Supported `DistributedType` values of accelerate.
_SUPPORTED_DISTRIBUTED_TYPES = "NO", "MULTI_CPU", "MULTI_GPU"
# Timeout of collectives: the other processes wait in one while rank 0 validates.
_COLLECTIVE_TIMEOUT = timedelta(hours=12)


def make_generator(config: Mapping[str, Any], scale: int, seed: int) -> nn.Module:
    """Build the generator of ``network_g`` with weights initialized from ``seed``.

    Args:
        config: The entries of ``network_g``: ``type`` and the options of that type.
        scale: Upscaling factor.
        seed: Seed of ``torch.manual_seed``.

    Raises:
        UsageError: For an unknown type, with the nearest name, and for options that the type does
            not have.
    """
    return _make("network_g", "generators", config, seed, scale=scale)


def make_discriminator(config: Mapping[str, Any], seed: int) -> nn.Module:
    """Build the discriminator of ``network_d``; raises as `make_generator`.

    The seed is ``seed + 1``, so that its weights are not those drawn for the generator.
    """
    return _make("network_d", "discriminators", config, seed + 1)


def _make(
    section: str, role: Role, config: Mapping[str, Any], seed: int, **given: int
) -> nn.Module:
    known, options = network_builders(role), dict(config)
    kind = str(options.pop("type", "")).lower()
    if kind not in known:
        raise UsageError(
            f"{section}.type: {kind!r} is not known", hint=hint_for_name(kind, tuple(known))
        )
    torch.manual_seed(seed)
    try:
        with limited_build(section):
            return known[kind](**given, **options)
    except (TypeError, ModelError) as error:
        message = getattr(error, "message", None) or str(error).splitlines()[0]
        raise UsageError(f"{section} ({kind}): {message}") from error


def load_pretrained(network: nn.Module, path: Path, *, strict: bool) -> list[str]:
    """Load ``path``'s weights into the generator and return the names not loaded.

    Weights with those names keep their random values. Unless ``strict``, weights of another shape
    are skipped.

    Raises:
        UsageError: If ``strict`` and the weights are those of another network, or if none fits.
    """
    from lowtide.models.loader import load

    try:
        source = load(path).module.state_dict()
    except ModelError as error:
        raise UsageError(f"path.pretrain_network_g: {error.message}") from error
    target = network.state_dict()
    matched = {
        name: weight
        for name, weight in source.items()
        if name in target and target[name].shape == weight.shape
    }
    unmatched = [name for name in target if name not in matched]
    if (strict and (unmatched or len(matched) < len(source))) or not matched:
        raise UsageError(
            f"path.pretrain_network_g: {path} has weights of another network: {len(matched)} of"
            f" {len(target)} tensors match",
            hint="use the same network_g, or strict_load_g: false to load those that match",
        )
    network.load_state_dict({**target, **matched})
    return unmatched


@contextmanager
def limited_build(section: str) -> Iterator[None]:
    """Refuse a network of ``section`` that takes more memory than there is, by `UsageError`."""
    room = available_host_bytes()
    try:
        with BuildLimitsMode.of_memory(room):
            yield
    except NetworkTooLargeError as error:
        raise UsageError(
            f"{section}: a network of these sizes takes more than the {format_bytes(room)} of"
            " memory that there are, or has hundreds of thousands of layers",
            hint="fewer channels or blocks",
        ) from error


def save_weights(path: Path, network: nn.Module, config: RunConfig) -> Path:
    """Write ``network`` as a safetensors file for `lowtide.load`, and return the path.

    The metadata say of which configuration it is, where its family writes one. Raises
    `OutputError`.
    """
    entries = {"lowtide.trained_as": config.name, "lowtide.seed": str(config.manual_seed)}
    entries |= lowtide_files.metadata_for(getattr(network, "config", None))
    lowtide_files.write_tensors(path, network.state_dict(), entries)
    return path


def make_accelerator(config: RunConfig, device: str) -> Any:
    """Build the `accelerate.Accelerator` of a training.

    It does device placement, autocast and fp16 gradient scaling. Raises UsageError if accelerate is
    missing, for fp16 on the CPU, and for a launch that shards the network.
    """
    try:
        from accelerate import Accelerator, InitProcessGroupKwargs
        from accelerate.state import AcceleratorState
    except ImportError as error:
        raise UsageError("training needs accelerate", hint=install_extra("train")) from error
    if config.precision == "fp16" and device == "cpu":
        raise UsageError("precision: fp16 needs a GPU", hint="precision: bf16, or fp32")
    mixed = "no" if config.precision == "fp32" else config.precision
    if AcceleratorState._shared_state and AcceleratorState().mixed_precision != mixed:
        AcceleratorState._reset_state()  # of a training before this one, in the same process
    group = InitProcessGroupKwargs(timeout=_COLLECTIVE_TIMEOUT)
    accelerator = Accelerator(mixed_precision=mixed, cpu=device == "cpu", kwargs_handlers=[group])
    kind = accelerator.distributed_type.value
    if kind not in _SUPPORTED_DISTRIBUTED_TYPES:
        raise UsageError(
            f"this training was launched for {kind}, which shards the networks; each process"
            " needs a whole copy of them",
            hint="torchrun --nproc-per-node 2 -m lowtide train KIND CONFIG",
        )
    return accelerator


def make_optimizer(
    optim: OptimSection, parameters: Iterable[nn.Parameter], *, foreach: bool | None = None
) -> torch.optim.Optimizer:
    """Build Adam or AdamW.

    ``foreach`` None leaves the choice of implementation to PyTorch, which depends on the device.
    """
    kind = torch.optim.AdamW if optim.type == "adamw" else torch.optim.Adam
    return kind(
        parameters, lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay, foreach=foreach
    )


def set_train_layout(network: nn.Module, *, channels_last: bool) -> None:
    """Set memory format and train mode of a network, in place."""
    order = torch.channels_last if channels_last else torch.contiguous_format
    network.to(memory_format=order).train()


def exclude_from_autocast(network: nn.Module) -> None:
    """Exclude modules with ``keeps_fp32`` from autocast, in place.

    In half precision the trained layers would learn the rounding errors of fixed ones.
    """
    for module in network.modules():
        if getattr(module, "keeps_fp32", False):
            module.forward = partial(_forward_in_fp32, type(module), module)


def _forward_in_fp32(kind: type[nn.Module], module: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        return kind.forward(module, x.float())


class EMAModel:
    """Exponential moving average of a network's parameters, kept as a module.

    ``module`` is a frozen deep copy in eval mode. Parameters are averaged, buffers are copied.
    """

    def __init__(self, network: nn.Module) -> None:
        self.module = copy.deepcopy(network).requires_grad_(False).eval()

    @torch.no_grad()
    def update(self, network: nn.Module, decay: float) -> None:
        """Update the average in place: ``decay * average + (1 - decay) * network``."""
        for mean, weight in zip(self.module.parameters(), network.parameters(), strict=True):
            mean.lerp_(weight.detach(), 1 - decay)
        for mean, buffer in zip(self.module.buffers(), network.buffers(), strict=True):
            mean.copy_(buffer)


def lr_factor(scheduler: SchedulerSection, step: int, total: int, warmup: int) -> float:
    """Return the factor on the base learning rate in step ``step`` of ``total``.

    Steps count from 0. A linear warmup over ``warmup`` steps multiplies the scheduler's factor.
    """
    warmup_factor = min(1.0, (step + 1) / (warmup + 1))
    if scheduler.type == "cosine":
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, step / total)))
        return warmup_factor * (scheduler.eta_min + (1 - scheduler.eta_min) * cosine)
    if scheduler.type == "multistep":
        passed = sum(step >= milestone for milestone in scheduler.milestones)
        return warmup_factor * scheduler.gamma**passed
    return warmup_factor


def loss_weight(entry: LossEntry, step: int) -> float:
    """Return a loss's weight in step ``step``: 0 before it starts, then a linear ramp."""
    since = step - entry.start_iter
    if since < 0:
        return 0.0
    return entry.loss_weight * min(1.0, (since + 1) / (entry.ramp_iter + 1))


def ema_decay(decay: float, warmup: int, step: int) -> float:
    """Return the EMA decay after step ``step``, counted from 0.

    It is smaller in the first steps, so that the average forgets the random initial weights.
    """
    return min(decay, (step + 1) / (step + 1 + warmup))
