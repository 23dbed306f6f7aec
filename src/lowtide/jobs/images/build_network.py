"""Build a `RunnableNetwork` from a model: its device, precision and memory format."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from lowtide.core.heap import trim_heap
from lowtide.core.option import Precision
from lowtide.memory.meter import resident_bytes_of
from lowtide.models import Model
from lowtide.models.loaded_model import SelfEnsemble, weight_bytes
from lowtide.models.onnx_model import OnnxModel
from lowtide.streaming.tiles.network import Forward, RunnableNetwork
from lowtide.streaming.tiles.tile_step import DTYPES

if TYPE_CHECKING:
    from torch import nn


def build_network(model: Model, device: str, precision: Precision) -> RunnableNetwork:
    """Move ``model`` to ``device`` in ``precision`` and return its `RunnableNetwork`.

    Below fp32 the network keeps a copy of the model in fp32 to measure the error against.
    """
    facts, fp32_factory = model.descriptor, None
    if precision != "fp32":
        fp32_factory = _fp32_factory(copy.deepcopy(model), device)
    model.to(device=device)
    if precision != "fp32":
        model.to_low_precision(DTYPES[precision])
        trim_heap(collect=True)  # free what tracing the layers' order left
    return RunnableNetwork(
        forward=model.module,
        scale=facts.scale,
        in_channels=facts.in_channels,
        out_channels=facts.out_channels,
        device=device,
        precision=precision,
        make_fp32_forward=fp32_factory,
        free_memory=model.module.session.release_memory if isinstance(model, OnnxModel) else None,
    )


def ensemble_network(network: RunnableNetwork) -> RunnableNetwork:
    """Wrap ``network`` and its fp32 reference in an 8-fold `SelfEnsemble`."""
    exact = network.make_fp32_forward
    return replace(
        network,
        forward=_self_ensemble(network.forward),
        make_fp32_forward=exact and functools.cache(lambda: _self_ensemble(exact())),
    )


def _self_ensemble(forward: Forward) -> SelfEnsemble:
    return SelfEnsemble(network_module(forward)).eval()


def network_weight_bytes(network: RunnableNetwork, model: Model) -> int:
    """Return the bytes of the network's weights and of its fp32 reference copy."""
    if isinstance(model, OnnxModel):
        # ONNX Runtime repacks the weights and keeps its graph too: up to ten times the file's
        # bytes.
        return max(model.descriptor.weight_bytes, resident_bytes_of(model.another_session))
    low = weight_bytes(network_module(network.forward))
    if network.make_fp32_forward is None:
        return low
    return low + weight_bytes(network_module(network.make_fp32_forward()))


def copy_network(network: RunnableNetwork, device: str) -> RunnableNetwork:
    """Copy ``network`` to ``device``; on the same device the copy shares the weights."""
    module = network_module(network.forward)
    if device == network.device:
        # Modules keep state while they run, so two threads cannot share one.
        return replace(network, forward=_copy_sharing_tensors(module))
    exact = network.make_fp32_forward
    return replace(
        network,
        forward=_copy_to(module, device),
        device=device,
        make_fp32_forward=exact and functools.cache(lambda: _copy_to(exact(), device)),
    )


def _copy_to(forward: Forward, device: str) -> nn.Module:
    return copy.deepcopy(network_module(forward)).to(device)


def network_module(forward: Forward) -> nn.Module:
    """Return the forward of a network that was built here, which is a module."""
    return cast("nn.Module", forward)


def _copy_sharing_tensors(module: nn.Module) -> nn.Module:
    tensors = (*module.parameters(), *module.buffers())
    return copy.deepcopy(module, {id(tensor): tensor for tensor in tensors})


def _fp32_factory(model: Model, device: str) -> functools.partial[nn.Module]:
    """Return a factory of the fp32 model that moves it to the device when called."""
    return functools.partial(model.module.to, device)


def to_memory_format(
    network: RunnableNetwork, model: Model, channels_last: bool
) -> RunnableNetwork:
    """Convert ``network``, built from ``model``, to channels-last if asked."""
    if not channels_last:
        return network
    network = replace(network, channels_last=True)
    model.to(memory_format=network.memory_format)
    return network
