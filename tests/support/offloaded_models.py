"""Small models that use their weights in all the ways that streaming has to survive."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Layers of equal size between small ends, with weights of its own."""

    def __init__(self, width=32, layers=8):
        super().__init__()
        self.place = nn.Parameter(torch.randn(width))
        self.enter, self.leave = nn.Linear(8, width), nn.Linear(width, 8)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))

    def forward(self, x):
        x = self.enter(x) + self.place
        for layer in self.layers:
            x = layer(x)
        return self.leave(x)


class Again(Stack):
    """One layer runs between all the others: A B A C A D ..."""

    def forward(self, x):
        x = self.enter(x)
        for layer in self.layers[1:]:
            x = layer(self.layers[0](x))
        return self.leave(x)


class Chosen(Stack):
    """The layers that run, and their order, are chosen from outside."""

    chosen = (0, 1, 2, 3, 4, 5, 6, 7)

    def forward(self, x):
        x = self.enter(x)
        for index in self.chosen:
            x = self.layers[index](x)
        return self.leave(x)


class Tied(nn.Module):
    """The last layer shares the first one's weight; one layer is registered twice."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(24, 24)
        self.middle = nn.ModuleList(nn.Linear(24, 24) for _ in range(6))
        self.twice = nn.ModuleList([nn.Linear(24, 24)] * 2)
        self.last = nn.Linear(24, 24, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x):
        x = F.pad(x, (0, 16))
        for layer in (self.first, *self.middle, *self.twice, self.last):
            x = torch.tanh(layer(x))
        return x


class Convolutions(nn.Sequential):
    """Channels last: weights are not contiguous."""

    def __init__(self):
        super().__init__(
            nn.Conv2d(8, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.SiLU(),
            *(nn.Conv2d(16, 16, 3, padding=1) for _ in range(6)),
            nn.GroupNorm(4, 16),
            nn.ConvTranspose2d(16, 4, 2, 2),
        )
        self.to(memory_format=torch.channels_last)

    def forward(self, x):
        rising = torch.linspace(0, 1, 12, dtype=x.dtype, device=x.device)
        x = x[:, :, None, None] * rising.view(1, 1, 3, 4)
        return super().forward(x)


class Attention(nn.Module):
    """Modules that read the weights of modules in them, and PyTorch's fused layers."""

    def __init__(self):
        super().__init__()
        self.alone = nn.MultiheadAttention(8, 2, batch_first=True)
        layer = nn.TransformerEncoderLayer(8, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)

    def forward(self, x):
        x = x[None]
        return self.encoder(self.alone(x, x, x, need_weights=False)[0])


class Recurrent(nn.Module):
    """Recurrent layers keep lists of their own weights."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(8, 8, 2, bidirectional=False) for _ in range(5))

    def forward(self, x):
        for layer in self.layers:
            x, _ = layer(x)
        return x


class Mixed(nn.Module):
    """Types, computed weights, loose and empty tensors, and outputs that are weights."""

    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(64, 8))
            self.register_buffer("steps", torch.arange(64))
            self.scale, self.none = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.empty(0, 8))

        def forward(self, count):
            return {"rows": self.table[:count], "all": [self.steps, self.scale, self.none]}

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(self.Table() for _ in range(6))
        self.normed = nn.ModuleList(parametrizations.weight_norm(nn.Linear(8, 8)) for _ in range(4))
        self.loose = nn.ParameterList(torch.randn(8) for _ in range(2))
        self.low = nn.ModuleList(nn.Linear(8, 8).bfloat16() for _ in range(4))

    def forward(self, x):
        found = [table(len(x)) for table in self.tables]
        for layer, scale in zip(self.normed, (*self.loose, 1, 1), strict=True):
            x = layer(x) * scale
        for layer in self.low:
            x = layer(x.bfloat16()).float()
        for item in found:
            steps, scale, none = item["all"]
            x = x + item["rows"] * scale + steps[: len(x), None] + none.sum()
        return x


class Parts(nn.Module):
    """The forward of the inner model is never called, only those of its parts."""

    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList(Layer(8) for _ in range(8))

    def forward(self, x):
        for layer in self.inner:
            x = layer.down(layer.up(layer.norm(x)))
        return x


ZOO = (Stack, Again, Chosen, Tied, Convolutions, Attention, Recurrent, Mixed, Parts)


def build(kind):
    """The same weights every time."""
    torch.manual_seed(7)
    model = kind().eval()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.uniform_(0.1, 0.5)
    return model


def inputs():
    """Five rows of eight numbers, the same every time."""
    return torch.linspace(-1, 1, 40).view(5, 8)


def state_of(model):
    """Bytes of every tensor, by name."""
    return {
        name: tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }
