"""A plain training script, without Lowtide: what ``estimate_plain.py`` measures from outside.

    python benchmarks/plain_steps.py NAME training|inference STEPS

Prints "ready" once all is imported, waits for a line, and prints one word after each step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn


class Recurrent(nn.Module):
    """Two layers of an LSTM on a series: (B, T, 32) to (B, T, 32)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(32, 256)
        self.layers = nn.LSTM(256, 256, num_layers=2, batch_first=True)
        self.head = nn.Linear(256, 32)

    def forward(self, series: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(series))[0])


class Language(nn.Module):
    """Six layers of a GPT: (B, T) tokens to (B, T, 8000) logits."""

    def __init__(self, words: int = 8000, width: int = 384, depth: int = 6) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(words, width), nn.Linear(width, words)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 6, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(depth)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        value = self.words(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for layer in self.layers:
            value = layer(value, src_mask=mask, is_causal=True)
        return self.head(value)


def unet() -> nn.Module:
    """A U-Net of diffusers with attention: (B, 3, H, W), (1,) to (B, 3, H, W)."""
    from diffusers import UNet2DModel

    return UNet2DModel(
        block_out_channels=(64, 128, 192, 256),
        layers_per_block=1,
        attention_head_dim=64,
        down_block_types=("DownBlock2D",) * 3 + ("AttnDownBlock2D",),
        up_block_types=("AttnUpBlock2D",) + ("UpBlock2D",) * 3,
    )


def vit() -> nn.Module:
    """A small vision transformer of torchvision: (B, 3, 224, 224) to (B, 1000)."""
    from torchvision.models import VisionTransformer

    return VisionTransformer(224, 16, num_layers=8, num_heads=6, hidden_dim=384, mlp_dim=1536)


def resnet() -> nn.Module:
    """torchvision's ResNet-18: (B, 3, H, W) to (B, 1000)."""
    from torchvision.models import resnet18

    return resnet18()


def convolutions() -> nn.Module:
    """Nine convolutions: (B, 3, H, W) to (B, 48, H, W)."""
    layers: list[nn.Module] = [nn.Conv2d(3, 48, 3, padding=1)]
    for _ in range(8):
        layers += [nn.ReLU(), nn.Conv2d(48, 48, 3, padding=1)]
    return nn.Sequential(*layers)


def perceptron() -> nn.Module:
    """Five wide linear layers, whose weights are most of it: (N, 1024) to (N, 2048)."""
    layers: list[nn.Module] = [nn.Linear(1024, 2048)]
    for _ in range(4):
        layers += [nn.GELU(), nn.Linear(2048, 2048)]
    return nn.Sequential(*layers)


def images(batch: int, size: int) -> tuple[Tensor, ...]:
    """(B, 3, size, size), from 0 to 1."""
    return (torch.rand(batch, 3, size, size),)


# By name: the model, and its inputs.
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "UNet, 2 of 128": (unet, lambda: (*images(2, 128), torch.tensor([500]))),
    "ViT, 8": (vit, lambda: images(8, 224)),
    "LSTM, 16 of 256": (Recurrent, lambda: (torch.rand(16, 256, 32),)),
    "ResNet, 8 of 224": (resnet, lambda: images(8, 224)),
    "GPT, 4 of 256": (Language, lambda: (torch.randint(0, 8000, (4, 256)),)),
    "UNet, 1 of 96": (unet, lambda: (*images(1, 96), torch.tensor([500]))),
    "ViT, 3": (vit, lambda: images(3, 224)),
    "LSTM, 64 of 200": (Recurrent, lambda: (torch.rand(64, 200, 32),)),
    "convolutions, 1 of 128": (convolutions, lambda: images(1, 128)),
    "convolutions, 4 of 128": (convolutions, lambda: images(4, 128)),
    "convolutions, 16 of 48": (convolutions, lambda: images(16, 48)),
    "perceptron, 1024": (perceptron, lambda: (torch.rand(1024, 1024),)),
}


def run(name: str, kind: str, steps: int) -> None:
    """Import all that the steps need, wait, then run them."""
    build, make_inputs = CASES[name]
    build()
    warmed = nn.Parameter(torch.zeros(2))
    warmed.grad = torch.zeros(2)
    torch.optim.AdamW([warmed]).step()  # imports more
    print("ready", flush=True)
    sys.stdin.readline()
    torch.manual_seed(0)
    model, inputs = build(), make_inputs()
    if kind == "inference":
        model.eval()
        for _ in range(steps):
            with torch.inference_mode():
                model(*inputs)
            print("step", flush=True)
        return
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(steps):
        result = model(*inputs)
        loss = (result if isinstance(result, Tensor) else result["sample"]).square().mean()
        del result
        loss.backward()
        del loss
        optimizer.step()
        optimizer.zero_grad()
        print("step", flush=True)


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2], int(sys.argv[3]))
