"""Networks that recognize things, with random weights, for tests of what looks through them."""

import torch
from torch import nn


def features(make):
    """The convolutions of torchvision's network, with weights that keep the maps' strength."""
    torch.manual_seed(0)
    with torch.device("meta"):
        network = make(weights=None).features
    network = network.to_empty(device="cpu").requires_grad_(False)
    for layer in network:
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight)
            nn.init.normal_(layer.bias, std=0.1)
    return network
