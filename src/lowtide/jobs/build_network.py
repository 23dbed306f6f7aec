"""Build a `NetworkSpec` from a model: its device, precision and memory format."""

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
    """Move ``model`` to ``device`` in ``precision`` and return its `NetworkSpec`.

    Below fp32 the network keeps a copy of the model in fp32 to measure the error against.
    """
    facts, twin = model.descriptor, None
    if precision != "fp32":
        twin = _fp32_twin(copy.deepcopy(model), device)
    model.to(device=device)
    if DTYPES[precision] != torch.float32:
        model.lower(DTYPES[precision])
        trim_heap(collect=True)  # free what tracing the layers' order left
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
    """Return the CPU reference for an ONNX file that another execution provider runs."""
    plain = model.plain
    return None if plain is None else lambda: plain


def ensemble_network(network: NetworkSpec) -> NetworkSpec:
    """Wrap ``network`` and its fp32 reference in an 8-fold `SelfEnsemble`."""
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
    """Return the bytes of the network's weights and of its fp32 reference copy."""
    if isinstance(model, OnnxModel):
        # ONNX Runtime repacks the weights and keeps its graph too: up to ten times the file's
        # bytes.
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
    """Copy ``network`` to ``device``; on the same device the copy shares the weights."""
    module = network.forward
    assert isinstance(module, torch.nn.Module)
    if device == network.device:
        # Modules keep state while they run, so two threads cannot share one.
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
    """Return a factory of the fp32 model that moves it to the device when called."""
    return functools.partial(model.module.to, device)


def in_memory_format(network: NetworkSpec, model: Model, channels_last: bool) -> NetworkSpec:
    """Convert ``network``, built from ``model``, to channels-last if asked."""
    if not channels_last:
        return network
    model.to(memory_format=torch.channels_last)
    return replace(network, channels_last=True)
