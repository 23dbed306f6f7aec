"""Perceptual loss and metrics: distances of VGG19 features, LPIPS and DISTS.

The loss is by Johnson et al., arXiv 1603.08155. Features are taken before the ReLU, as since
ESRGAN (arXiv 1809.00219); the default layers and weights are those usual since Real-ESRGAN
(arXiv 2107.10833). VGG19 is by Simonyan and Zisserman, arXiv 1409.1556.

LPIPS is by Zhang et al., arXiv 1801.03924, DISTS by Ding et al., arXiv 2004.07728; of equal images
they are 0. Both are computed by torchmetrics, whose package has the learned weights of layers and
channels. Backbones are torchvision's, trained on ImageNet; users give their weights as files, and
nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
import pickle
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torchvision.models import AlexNet_Weights, VGG16_Weights, alexnet, vgg16, vgg19

from lowtide.core.atomic_file import atomic_output
from lowtide.core.errors import ModelError, UsageError, hint_for_name, install_extra
from lowtide.core.input_file import exists, require_input
from lowtide.models import lowtide_files
from lowtide.training.losses.pixel import require_positive, to_common_dtype, to_full_precision

# ImageNet normalization of RGB in 0..1, as torchvision's networks were trained.
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# Convolutions of each of VGG19's stages; a ReLU follows each, and pooling each stage.
_STAGES = 2, 2, 4, 4, 4
_DEFAULT_LAYERS = {"conv1_2": 0.1, "conv2_2": 0.1, "conv3_4": 1.0, "conv4_4": 1.0, "conv5_4": 1.0}
_WEIGHTS_HINT = "pass torchvision's VGG19 weights, vgg19-dcbb9e9d.pth, or the same as .safetensors"

Kind = Literal["lpips", "dists"]
Net = Literal["alex", "vgg"]
# Constructor, published weights, name, and the smallest side in pixels at which the network's
# pooling still leaves a feature.
_NETWORKS: dict[Net, tuple[Any, Any, str, int]] = {
    "alex": (alexnet, AlexNet_Weights.DEFAULT, "AlexNet", 31),
    "vgg": (vgg16, VGG16_Weights.DEFAULT, "VGG16", 16),
}


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
        16 for conv5), and as `to_common_dtype`.
        """
        prediction, target = to_common_dtype(prediction, target)
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
                found[depth] = to_full_precision(x)
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
    found = read_pretrained_tensors(path, "perceptual weights", _WEIGHTS_HINT)
    network.load_state_dict(
        select_features(found, needed, path, "VGG19", _WEIGHTS_HINT), assign=True
    )
    for layer in network:
        if isinstance(layer, nn.ReLU):
            # In place it would overwrite the features, which are taken before the ReLU.
            layer.inplace = False
    return network.requires_grad_(False).eval()


def read_pretrained_tensors(path: Path, what: str, hint: str) -> dict[str, Tensor]:
    """Return the tensors of a .pth or .safetensors file, of any shape, on the CPU.

    No code of the file is run. ``what`` names the weights in messages. Raises UsageError with
    ``hint`` for other files, and for those that hold no state dict.
    """
    suffix = path.suffix.lower()
    if suffix not in (".pth", ".safetensors"):
        raise UsageError(f"{what} must be a .pth or .safetensors file, not {path}", hint=hint)
    if not exists(path):
        raise UsageError(f"there is no file with {what} at {path}", hint=hint)
    require_input(path, UsageError, hint=hint)
    try:
        if suffix == ".safetensors":
            return lowtide_files.read_tensors(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, ModelError) as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(f"{path} cannot be read: {reason}", hint=hint) from error
    if not isinstance(found, dict):
        raise UsageError(f"{path} contains a {type(found).__name__}, not a state dict", hint=hint)
    return {
        name: value
        for name, value in found.items()
        if isinstance(name, str) and isinstance(value, Tensor)
    }


def select_features(
    tensors: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    path: Path,
    network: str,
    hint: str,
) -> dict[str, Tensor]:
    """Return the tensors of ``tensors`` that ``network``'s features need, in fp32.

    Names in ``tensors`` may have the prefix ``features.``. The result has the names and shapes of
    ``expected``, (out channels, C, height, width) for convolutions. Raises UsageError naming
    tensors that are missing or have another shape.
    """
    by_name = {name.removeprefix("features."): tensor for name, tensor in tensors.items()}
    mismatches = [f"no {name}" for name in expected if name not in by_name]
    mismatches += [
        f"{name} of shape {tuple(by_name[name].shape)} instead of {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if name in by_name and by_name[name].shape != tensor.shape
    ]
    if mismatches:
        more = f" and {len(mismatches) - 4} more" if len(mismatches) > 4 else ""
        raise UsageError(
            f"{path} does not match {network}: it has {', '.join(mismatches[:4])}{more}", hint=hint
        )
    return {name: by_name[name].float() for name in expected}


class PerceptualMetric(nn.Module):
    """LPIPS (AlexNet or VGG16 backbone) or DISTS (VGG16) of two batches of images.

    The backbone is in fp32, frozen, in eval mode. Construction takes up to 0.6 GB for a moment,
    because the whole network is held, classifier included.

    Args:
        kind: ``lpips`` or ``dists``.
        weights: torchvision's state dict of the backbone as .pth, or its tensors as .safetensors.
            The classifier may be missing.
        net: The backbone; by default ``alex`` for LPIPS and ``vgg`` for DISTS.

    Raises:
        UsageError: If torchmetrics is missing, for DISTS with AlexNet, or for a file that does
            not fit.
    """

    def __init__(self, kind: Kind, weights: str | Path, net: Net | None = None) -> None:
        super().__init__()
        if importlib.util.find_spec("torchmetrics") is None:
            raise UsageError(
                f"{kind} is computed by torchmetrics, which is not installed",
                hint=install_extra("train"),
            )
        self.kind: Kind = kind
        self.net: Net = net or ("alex" if kind == "lpips" else "vgg")
        if kind == "dists" and self.net != "vgg":
            raise UsageError("DISTS supports only VGG16", hint="remove net")
        with _local_backbone_weights(self.net, Path(weights)):
            self._network = _build_metric(kind, self.net)
        self._network.requires_grad_(False).eval()

    @property
    def min_side(self) -> int:
        """Smallest height and width in pixels that the backbone takes."""
        return _NETWORKS[self.net][3]

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Return the distance of each image pair, (B,), 0 or above up to rounding.

        ``prediction`` and ``target`` are (B, 3, H, W) in 0..1. Raises UsageError for images with
        a side below `min_side`.
        """
        if min(prediction.shape[2:]) < self.min_side:
            raise UsageError(
                f"{self.kind} by {_NETWORKS[self.net][2]} needs sides of at least"
                f" {self.min_side} pixels, not an image of"
                f" {prediction.shape[3]}×{prediction.shape[2]}"
            )
        more = {"normalize": True} if self.kind == "lpips" else {}
        return self._network(prediction, target, **more).reshape(-1)


def _build_metric(kind: Kind, net: Net) -> nn.Module:
    """Build torchmetrics' network, which loads its backbone through torchvision."""
    if kind == "dists":
        from torchmetrics.functional.image.dists import DISTSNetwork

        return DISTSNetwork()
    from torchmetrics.image import LearnedPerceptualImagePatchSimilarity

    return LearnedPerceptualImagePatchSimilarity(net_type=net, normalize=True).net


@contextmanager
def _local_backbone_weights(net: Net, path: Path) -> Iterator[None]:
    """Serve the weights from a temporary torch hub folder instead of a download."""
    make, published, name, _ = _NETWORKS[net]
    file = Path(published.url).name
    hint = f"pass torchvision's {name} weights, {file}, or the same as .safetensors"
    with torch.device("meta"):
        expected = make(weights=None).state_dict()
    features = {
        key.removeprefix("features."): tensor
        for key, tensor in expected.items()
        if key.startswith("features.")
    }
    loaded = select_features(
        read_pretrained_tensors(path, f"{name} weights", hint), features, path, name, hint
    )
    # The classifier is never used: one expanded zero stands for each of its tensors.
    state = {key: torch.zeros(1).expand(tensor.shape) for key, tensor in expected.items()}
    state |= {f"features.{key}": tensor for key, tensor in loaded.items()}
    before = torch.hub.get_dir()
    with tempfile.TemporaryDirectory(prefix="lowtide-") as folder:
        target = Path(folder) / "checkpoints" / file
        target.parent.mkdir()
        with atomic_output(target) as part:
            torch.save(state, part)
        torch.hub.set_dir(folder)
        try:
            yield
        finally:
            torch.hub.set_dir(before)
