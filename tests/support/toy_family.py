"""A family of models from outside of the package: one module, and its entry point."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from lowtide import ModelError
from lowtide.models import Architecture, FileConfig, ModelDescriptor, ModelFamily


@dataclass(frozen=True)
class ToyConfig(FileConfig):
    scale: int
    width: int = 4


class Toy(nn.Module):
    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        self.config = config
        self.toy_in = nn.Conv2d(3, config.width, 3, padding=1)
        self.toy_out = nn.Conv2d(config.width, 3 * config.scale**2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.pixel_shuffle(self.toy_out(F.relu(self.toy_in(x))), self.config.scale)


def load(path, name: str, digest: str, state: Mapping[str, Tensor]):
    width, outputs = len(state["toy_in.weight"]), len(state["toy_out.weight"])
    scale = round((outputs / 3) ** 0.5)
    if 3 * scale**2 != outputs:
        raise ModelError(f"{path} looks like a toy, but its scale is not an integer")
    network = Toy(ToyConfig(scale, width))
    network.load_state_dict(state)
    facts = ModelDescriptor(
        name=name,
        architecture="Toy",
        purpose="SR",
        scale=scale,
        in_channels=3,
        out_channels=3,
        supports_half=True,
        supports_bfloat16=True,
        tiling="supported",
        tags=(),
        sha256=digest,
        path=str(path),
    )
    return network, facts


FAMILY = ModelFamily(
    name="Toys",
    architectures={"Toy": Architecture(ToyConfig, Toy, "supported")},
    recognizes=lambda names: {"toy_in.weight", "toy_out.weight"} <= set(names),
    load=load,
    generators={"toy": lambda scale, **options: Toy(ToyConfig(scale, **options))},
)
