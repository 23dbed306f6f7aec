"""Perceptual loss: L1 distance of VGG19 features.

The loss is by Johnson et al., arXiv 1603.08155. Features are taken before the ReLU, as since
ESRGAN (arXiv 1809.00219); the default layers and weights are those usual since Real-ESRGAN
(arXiv 2107.10833). VGG19 is by Simonyan and Zisserman, arXiv 1409.1556.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torchvision.models import vgg19

from lowtide.core.errors import UsageError, hint_for_name
from lowtide.training.losses.pixel import common_dtype, full_precision, require_positive
from lowtide.training.pretrained import read_tensors, select_features

# ImageNet normalization of RGB in 0..1, as torchvision's networks were trained.
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# Convolutions of each of VGG19's stages; a ReLU follows each, and pooling each stage.
_STAGES = 2, 2, 4, 4, 4
_DEFAULT_LAYERS = {"conv1_2": 0.1, "conv2_2": 0.1, "conv3_4": 1.0, "conv4_4": 1.0, "conv5_4": 1.0}
_WEIGHTS_HINT = "pass torchvision's VGG19 weights, vgg19-dcbb9e9d.pth, or the same as .safetensors"


class PerceptualLoss(nn.Module):
    """VGG19 perceptual loss: sum over layers of weight * mean(|feature difference|).

    VGG19, the module's ``network``, is frozen and always in eval mode.

    Args:
        weights: File with torchvision's VGG19 state dict as .pth, or its tensors as .safetensors,
            with or without the prefix ``features.``; nothing is downloaded.
        layers: Layer names, conv1_1 to conv5_4, with weights above 0. By default conv1_2 and
            conv2_2 have 0.1, conv3_4, conv4_4 and conv5_4 have 1.

    Raises:
        UsageError: For unknown layers or invalid weights, and for a file that does not fit.
    """

    def __init__(self, weights: str | Path, layers: Mapping[str, float] | None = None) -> None:
        super().__init__()
        self.layers = _validated_layers(_DEFAULT_LAYERS if layers is None else layers)
        self._weights_by_index = {
            _layer_index(name): weight for name, weight in self.layers.items()
        }
        self.network = _load_vgg19(Path(weights), max(self._weights_by_index))

    def train(self, mode: bool = True) -> PerceptualLoss:
        """Set the mode of the loss, and leave its network in eval mode."""
        self.training = mode
        return self

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Return the scalar loss of two (B, 3, H, W) in 0..1.

        Gradients flow to the prediction only. Under autocast VGG19 runs in its dtype; features
        are compared in fp32. Raises UsageError for sides too small for the pooling layers (below
        16 for conv5), and as `common_dtype`.
        """
        prediction, target = common_dtype(prediction, target)
        network = self.network
        min_side = 2 ** sum(isinstance(layer, nn.MaxPool2d) for layer in network)
        height, width = prediction.shape[2:]
        if min(height, width) < min_side:
            raise UsageError(
                f"the perceptual loss of {', '.join(self.layers)} needs sides of at least"
                f" {min_side} pixels, not an image of {width}x{height}"
            )
        with torch.no_grad():
            target_features = self._features(target)
        found = self._features(prediction)
        terms = [
            weight * (found[depth] - target_features[depth]).abs().mean()
            for depth, weight in self._weights_by_index.items()
        ]
        return torch.stack(terms).sum()

    def _features(self, image: Tensor) -> dict[int, Tensor]:
        """Return the full-precision feature maps of (B, 3, H, W), by layer index."""
        network = self.network
        x = (image - image.new_tensor(_MEAN).view(1, 3, 1, 1)) / image.new_tensor(_STD).view(
            1, 3, 1, 1
        )
        x = x.to(next(network.parameters()).dtype)
        found = {}
        for depth, layer in enumerate(network):
            x = layer(x)
            if depth in self._weights_by_index:
                found[depth] = full_precision(x)
        return found


def _validated_layers(layers: Mapping[str, float]) -> dict[str, float]:
    """Return the layers with float weights.

    Raises UsageError for no layer, an unknown one, and a weight that is not above 0.
    """
    known = [
        f"conv{stage}_{place}"
        for stage, convs in enumerate(_STAGES, 1)
        for place in range(1, convs + 1)
    ]
    if not layers:
        raise UsageError(
            "the perceptual loss needs at least one layer", hint=hint_for_name("", known)
        )
    for name in layers:
        if name not in known:
            raise UsageError(
                f"VGG19 has no layer {name!r}; it has conv1_1 to conv{len(_STAGES)}_{_STAGES[-1]}",
                hint=hint_for_name(name, known),
            )
    return {
        name: require_positive(f"the perceptual weight of {name}", weight)
        for name, weight in layers.items()
    }


def _layer_index(name: str) -> int:
    """Return the index of ``convSTAGE_PLACE`` in torchvision's ``features``."""
    stage, place = (int(number) for number in name.removeprefix("conv").split("_"))
    return sum(2 * convs + 1 for convs in _STAGES[: stage - 1]) + 2 * (place - 1)


def _load_vgg19(path: Path, deepest: int) -> nn.Sequential:
    """Load VGG19's ``features`` up to index ``deepest``, frozen, in fp32."""
    # On the meta device the classifier, six sevenths of VGG19, costs neither time nor memory.
    with torch.device("meta"):
        network = nn.Sequential(*list(vgg19(weights=None).features.children())[: deepest + 1])
    needed = network.state_dict()
    found = read_tensors(path, "perceptual weights", _WEIGHTS_HINT)
    network.load_state_dict(
        select_features(found, needed, path, "VGG19", _WEIGHTS_HINT), assign=True
    )
    for layer in network:
        if isinstance(layer, nn.ReLU):
            # In place it would overwrite the features, which are taken before the ReLU.
            layer.inplace = False
    return network.requires_grad_(False).eval()
