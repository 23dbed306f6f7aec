"""Networks as ncnn reads them: a list of layers as text, and their weights as bytes.

A family writes its graph from the configuration and the tensors of a file (`NcnnGraphBuilder`), so
that one file of weights serves PyTorch and ncnn. Nothing here imports either.

Source: ncnn's documentation, "param and model file structure", and the operation parameters.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

INPUT, OUTPUT = "in0", "out0"
_MAGIC = 7767517  # the first line of every text of layers
_FP32 = b"\0\0\0\0"  # stands before weights that are not compressed
_LEAKY_RELU = 2
_REPLICATE = 1


@dataclass(frozen=True)
class NcnnGraph:
    """Layers and weights of a network from `INPUT`, (C, H, W) in float32, to `OUTPUT`.

    For each pixel of the input, ``multiply_adds`` are the work of convolutions, ``layer_values``
    the most values that a layer reads and writes, and ``result_values`` those of the result.
    """

    param: str
    weights: bytes
    multiply_adds: float
    layer_values: float
    result_values: float


@dataclass(frozen=True)
class _Layer:
    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parameters: str = ""


class NcnnGraphBuilder:
    """Writes a graph layer by layer; each method returns the name of what the layer makes.

    Names may be read by any number of layers.
    """

    def __init__(self, channels: int) -> None:
        self._layers: list[_Layer] = []
        self._weights: list[bytes] = []
        # Channels of each result, and its pixels for each of the input's.
        self._maps: dict[str, tuple[int, float]] = {}
        self._multiply_adds = self._most_values = 0.0
        self.input(INPUT, channels)

    def input(self, name: str, channels: int, pixels: float = 1.0) -> str:
        """Add an input of this name, with so many ``pixels`` for each of the first."""
        self._layers.append(_Layer("Input", (), (name,)))
        self._maps[name] = channels, pixels
        return name

    def conv(
        self,
        x: str,
        weight: np.ndarray,
        bias: np.ndarray | None = None,
        *,
        padding: int = 0,
        stride: int = 1,
        depthwise: bool = False,
        leaky_slope: float | None = None,
    ) -> str:
        """Add a convolution with ``weight`` (out, in, kH, kW), and a leaky ReLU after it.

        ``in`` is 1 for a ``depthwise`` one, of each channel by itself.
        """
        outputs, inputs, height, width = weight.shape
        if inputs != (1 if depthwise else self._maps[x][0]):  # ncnn would read beyond its arrays
            raise ValueError(f"a convolution of {inputs} channels gets {self._maps[x][0]}")
        if bias is not None and bias.shape != (outputs,):
            raise ValueError(f"a convolution to {outputs} channels has a bias of {bias.shape}")
        values = {0: outputs, 1: width, 11: height, 3: stride, 4: padding, 5: int(bias is not None)}
        values[6] = weight.size
        if depthwise:
            values[7] = outputs
        words = [f"{key}={value}" for key, value in values.items()]
        if leaky_slope is not None:
            words += [f"9={_LEAKY_RELU}", f"-23310=1,{leaky_slope!r}"]
        self._weights.append(_FP32 + _little_endian(weight))
        if bias is not None:
            self._weights.append(_little_endian(bias))
        kind = "ConvolutionDepthWise" if depthwise else "Convolution"
        pixels = self._maps[x][1] / stride**2
        self._multiply_adds += weight.size * pixels
        return self._add(kind, (x,), " ".join(words), (outputs, pixels))

    def replicate_pad(self, x: str, size: int) -> str:
        """Add ``size`` rows and columns on each side, equal to the border."""
        sides = " ".join(f"{key}={size}" for key in range(4))
        return self._add("Padding", (x,), f"{sides} 4={_REPLICATE}")

    def add(self, one: str, other: str | float) -> str:
        """Add two results, of one shape or of one channel each to many, or a number."""
        return self._binary(0, one, other)

    def subtract(self, one: str, other: str) -> str:
        """Subtract ``other`` from ``one``."""
        return self._binary(1, one, other)

    def multiply(self, one: str, other: str | float) -> str:
        """Multiply two results, or a result with a number."""
        return self._binary(2, one, other)

    def channel_norm(self, x: str, channels: int, epsilon: float) -> str:
        """Subtract the mean over the channels of each pixel, and divide by their deviation."""
        centered = self.subtract(x, self._over_channels(3, x, 1.0))
        variance = self._over_channels(2, centered, 1 / channels)
        deviation = self._add("UnaryOp", (self.add(variance, epsilon),), "0=5")
        return self._binary(3, centered, deviation)

    def halves(self, x: str) -> tuple[str, str]:
        """Split the channels in two halves."""
        one, other = (f"blob{len(self._layers)}{part}" for part in "ab")
        self._layers.append(_Layer("Slice", (x,), (one, other), "-23300=2,-233,-233 1=0"))
        channels, pixels = self._maps[x]
        self._maps[one] = self._maps[other] = channels // 2, pixels
        return one, other

    def concatenate(self, one: str, other: str) -> str:
        """Put the channels of two results after one another."""
        (channels, pixels), (more, _) = self._maps[one], self._maps[other]
        return self._add("Concat", (one, other), "0=0", (channels + more, pixels))

    def pixel_unshuffle(self, x: str, scale: int) -> str:
        """Turn (C, H·s, W·s) into (C·s², H, W) as `torch.nn.functional.pixel_unshuffle` does."""
        channels, pixels = self._maps[x]
        made = channels * scale**2, pixels / scale**2
        return self._add("Reorg", (x,), f"0={scale} 1=0", made)

    def pixel_shuffle(self, x: str, scale: int) -> str:
        """Turn (C·s², H, W) into (C, H·s, W·s) as `torch.nn.functional.pixel_shuffle` does."""
        channels, pixels = self._maps[x]
        made = channels // scale**2, pixels * scale**2
        return self._add("PixelShuffle", (x,), f"0={scale} 1=0", made)

    def build(self, result: str) -> NcnnGraph:
        """Return the graph that makes ``result``."""
        lines = []
        for number, one in enumerate(layers := self._with_splits()):
            made = [OUTPUT if name == result else name for name in one.outputs]
            words = one.kind, f"{one.kind.lower()}_{number}", len(one.inputs), len(made)
            lines.append(" ".join(map(str, (*words, *one.inputs, *made, one.parameters))))
        head = str(_MAGIC), f"{len(layers)} {sum(len(one.outputs) for one in layers)}"
        text = "\n".join((*head, *lines)) + "\n"
        channels, pixels = self._maps[result]
        return NcnnGraph(
            text,
            b"".join(self._weights),
            self._multiply_adds,
            self._most_values,
            channels * pixels,
        )

    def _binary(self, operation: int, one: str, other: str | float) -> str:
        if isinstance(other, str):
            return self._add("BinaryOp", (one, other), f"0={operation}")
        return self._add("BinaryOp", (one,), f"0={operation} 1=1 2={other!r}")

    def _over_channels(self, operation: int, x: str, factor: float) -> str:
        words = f"0={operation} 1=0 2={factor!r} -23303=1,0 4=1 5=1"
        return self._add("Reduction", (x,), words, (1, self._maps[x][1]))

    def _add(
        self,
        kind: str,
        inputs: tuple[str, ...],
        parameters: str,
        made: tuple[int, float] | None = None,
    ) -> str:
        """Add a layer that makes (channels, pixels), by default those of its first input."""
        name = f"blob{len(self._layers)}"
        self._layers.append(_Layer(kind, inputs, (name,), parameters))
        self._maps[name] = made or self._maps[inputs[0]]
        values = sum(
            channels * pixels for channels, pixels in (self._maps[one] for one in (*inputs, name))
        )
        self._most_values = max(self._most_values, values)
        return name

    def _with_splits(self) -> list[_Layer]:
        """Return the layers with a copy of each result for each of its readers, as ncnn wants."""
        readers = Counter(name for one in self._layers for name in one.inputs)
        taken: Counter[str] = Counter()

        def copy_of(name: str) -> str:
            taken[name] += 1
            return f"{name}_{taken[name]}" if readers[name] > 1 else name

        layers: list[_Layer] = []
        for one in self._layers:
            layers.append(replace(one, inputs=tuple(map(copy_of, one.inputs))))
            for name in one.outputs:
                if (count := readers[name]) > 1:
                    copies = tuple(f"{name}_{number + 1}" for number in range(count))
                    layers.append(_Layer("Split", (name,), copies))
        return layers


def _little_endian(values: np.ndarray) -> bytes:
    return np.ascontiguousarray(values, "<f4").tobytes()
