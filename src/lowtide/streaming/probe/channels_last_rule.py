"""Memory format of a network's images, by a rule of the network, the device and the precision.

The format changes the rounding, so the choice must not depend on timing.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lowtide.streaming.tiles.tile_step import NetworkSpec

# Tensor cores take channels in groups of so many 16-bit numbers.
_CHANNEL_GROUP = 8


def in_memory_format(network: NetworkSpec) -> NetworkSpec:
    """Return ``network`` with channels-last inputs if `takes_channels_last`."""
    return replace(network, channels_last=takes_channels_last(network))


def takes_channels_last(network: NetworkSpec) -> bool:
    """Return whether ``network`` takes channels-last inputs.

    On the CPU if it has convolutions: of 27 kinds of networks none took more than 1.02 of the time
    that it took with its channels first, and those of convolutions alone 0.7 to 0.95.

    On a GPU if most weights of its convolutions are of layers that run on tensor cores, which is in
    16 bits and with a multiple of 8 channels on both sides: cuDNN's kernels for them read channels
    last, and rearrange what comes in the other order. In fp32 channels stay first: whether TF32 is
    allowed is a setting that a program may change at any time. This is NVIDIA's advice for its
    libraries; it has not been measured here.

    Source: NVIDIA, Convolutional Layers User's Guide, "Tensor Layouts In Memory: NCHW vs NHWC".
    """
    forward = network.forward
    if not isinstance(forward, torch.nn.Module):
        return False
    weights = [weight for weight in forward.parameters() if weight.dim() == 4]
    if network.device == "cpu":
        return bool(weights)
    if network.precision == "fp32":
        return False
    suited = sum(weight.numel() for weight in weights if _suits_tensor_cores(weight))
    return 2 * suited > sum(weight.numel() for weight in weights)


def _suits_tensor_cores(weight: Tensor) -> bool:
    """Return whether a convolution (out, in of a group, H, W) has channels in whole groups."""
    return all(channels % _CHANNEL_GROUP == 0 for channels in weight.shape[:2])
