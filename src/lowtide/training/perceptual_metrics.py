"""LPIPS and DISTS, perceptual distances of two images.

The distance of equal images is 0; lower is better. LPIPS is by Zhang et al., arXiv 1801.03924,
DISTS by Ding et al., arXiv 2004.07728. Both are computed by torchmetrics, whose package has the
learned weights of layers and channels. The backbone is torchvision's, trained on ImageNet; users
give its weights as a file.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torchvision.models import AlexNet_Weights, VGG16_Weights, alexnet, vgg16

from lowtide.core.atomic_file import atomic_output
from lowtide.core.errors import UsageError
from lowtide.core.install_hints import install_extra
from lowtide.training.pretrained import read_tensors, select_features

Kind = Literal["lpips", "dists"]
Net = Literal["alex", "vgg"]

# Constructor, published weights, name, and the smallest side in pixels at which the network's
# pooling still leaves a feature.
_NETWORKS: dict[Net, tuple[Any, Any, str, int]] = {
    "alex": (alexnet, AlexNet_Weights.DEFAULT, "AlexNet", 31),
    "vgg": (vgg16, VGG16_Weights.DEFAULT, "VGG16", 16),
}


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
        read_tensors(path, f"{name} weights", hint), features, path, name, hint
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
