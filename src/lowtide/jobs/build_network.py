"""Models as networks that the runner takes: on a device, in a precision, in an order of memory."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace

import torch

from lowtide.core.heap import trim_heap
from lowtide.core.precision import Precision, is_eight_bits
from lowtide.memory.meter import held_bytes
from lowtide.models import Model
from lowtide.models.loaded_model import weight_bytes
from lowtide.models.onnx_model import OnnxModel
from lowtide.models.quantize import quantize_linear
from lowtide.models.self_ensemble import SelfEnsemble
from lowtide.streaming.tiles.tile_step import DTYPES, Forward, NetworkSpec


def build_network(model: Model, device: str, precision: Precision) -> NetworkSpec:
    """``model``, moved to ``device`` and changed to compute in ``precision``, which keeps another
    of it in fp32 beside any lower one."""
    facts, twin = model.descriptor, None
    if precision != "fp32":
        twin = _fp32_twin(copy.deepcopy(model), device)
    model.to(device=device)
    if DTYPES[precision] != torch.float32:
        model.lower(DTYPES[precision])
        trim_heap(collect=True)  # of the runs that found its layers' order
    if is_eight_bits(precision):
        quantize_linear(model.module, device, precision)
    return NetworkSpec(
        forward=model.module,
        scale=facts.scale,
        in_channels=facts.in_channels,
        out_channels=facts.out_channels,
        device=device,
        precision=precision,
        exact_forward=_by_the_cpu(model) if isinstance(model, OnnxModel) else twin,
        let_go=model.module.session.let_go if isinstance(model, OnnxModel) else None,
    )


def _by_the_cpu(model: OnnxModel) -> Callable[[], Forward] | None:
    """What a file's numbers are compared with where another provider than the CPU's runs it."""
    plain = model.plain
    return None if plain is None else lambda: plain


def ensemble_network(network: NetworkSpec) -> NetworkSpec:
    """``network``, and that in fp32 beside it, asked eight times."""
    exact = network.exact_forward
    return replace(
        network,
        forward=_eight_times(network.forward),
        exact_forward=exact and functools.cache(lambda: _eight_times(exact())),
    )


def _eight_times(forward: Forward) -> SelfEnsemble:
    assert isinstance(forward, torch.nn.Module)
    return SelfEnsemble(forward).eval()


def network_weight_bytes(network: NetworkSpec, model: Model) -> int:
    """Bytes of its weights, and of those in fp32 that a lower precision is measured against."""
    if isinstance(model, OnnxModel):
        # The runtime lays them out anew beside its graph, and both may take ten times the file.
        known = model.descriptor.weight_bytes
        beside = 0 if model.plain is None else known
        return max(known, held_bytes(model.another_session)) + beside
    assert isinstance(network.forward, torch.nn.Module)
    low = weight_bytes(network.forward)
    if network.exact_forward is None:
        return low
    exact = network.exact_forward()
    assert isinstance(exact, torch.nn.Module)
    return low + weight_bytes(exact)


def copy_network(network: NetworkSpec, device: str) -> NetworkSpec:
    """``network`` once more on a device; on the same one with the same weights."""
    module = network.forward
    assert isinstance(module, torch.nn.Module)
    if device == network.device:
        # Models keep things of their own while they run, which no two threads may share.
        return replace(network, forward=_with_same_tensors(module))
    exact = network.exact_forward
    return replace(
        network,
        forward=_copied_to(module, device),
        device=device,
        exact_forward=exact and functools.cache(lambda: _copied_to(exact(), device)),
    )


def _copied_to(forward: Forward, device: str) -> torch.nn.Module:
    assert isinstance(forward, torch.nn.Module)
    return copy.deepcopy(forward).to(device)


def _with_same_tensors(module: torch.nn.Module) -> torch.nn.Module:
    tensors = (*module.parameters(), *module.buffers())
    return copy.deepcopy(module, {id(tensor): tensor for tensor in tensors})


def _fp32_twin(model: Model, device: str) -> functools.partial[torch.nn.Module]:
    """The model in fp32, moved to the device only when it is first called for."""
    return functools.partial(model.module.to, device)


def in_memory_format(network: NetworkSpec, model: Model, channels_last: bool) -> NetworkSpec:
    """``network``, which is ``model``'s, for images whose channels lie last, or as it is."""
    if not channels_last:
        return network
    model.to(memory_format=torch.channels_last)
    return replace(network, channels_last=True)
