"""Halo windows on a GPU: Triton, portable, unfold and SDPA, FlexAttention, NATTEN.

    python benchmarks/attention_gpu.py [--sides 1024 2048] [--rounds 20] [--fresh]

bf16, 64 channels as 2 heads of 32 and 1 of 64; query, key and value are computed before. Wall time
between CUDA events, each kernel once per round; forward, and forward with backward. The roofline is
the larger of two times: that of all products, at the rate of bf16 products of large matrices
measured in the same run, and that of one exponential per score at 16 per clock and multiprocessor;
shares are the roofline's time divided by the measured time. FlexAttention gets the same windows as
a mask of blocks over pixels in tiles of 8×8; NATTEN the nearest it has: windows of 33 centered on
each pixel. Without either package, there is no row of it.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
from collections.abc import Callable

import torch
from common import ResultFile
from torch import Tensor

from lowtide.attention.functional import attention
from lowtide.attention.halo.autograd import halo_attention
from lowtide.attention.spatial.position import PositionEncoding
from lowtide.attention.spatial.row_windows import RowWindowAttention
from lowtide.attention.spatial.window_grid import WindowGeometry

WINDOWS = WindowGeometry()
# In GPU clock cycles: some milliseconds.
_WAIT_CYCLES = 10_000_000
Run = Callable[[Tensor, Tensor, Tensor], Tensor]


def kernel(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """One launch."""
    return halo_attention(query, key, value, WINDOWS)


def portable(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Rows of windows through PyTorch's kernels."""

    seen = torch.stack([key, value], 3)

    def load(part: str, first: int, last: int) -> Tensor:
        return (query if part == "query" else seen)[:, first:last]

    local = RowWindowAttention(WINDOWS, *query.shape[1:3], PositionEncoding(), attention)
    return torch.cat([piece.transpose(1, 2) for _, piece in local.run(load)], 1)


def unfolded(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """All windows cut out, one call of SDPA; zeros beyond the image are not masked."""
    height, width = query.shape[1:3]
    step, size, margin = WINDOWS.stride, WINDOWS.size, WINDOWS.halo
    down, right = WINDOWS.count(height, 0), WINDOWS.count(width, 0)
    below, padded_right = down * step + size - height, right * step + size - width

    def cut(tensor: Tensor, first: int, side: int) -> Tensor:
        tensor = torch.nn.functional.pad(tensor, (0, 0, 0, 0, margin, padded_right, margin, below))
        tensor = tensor[:, first:, first:].unfold(1, side, step)[:, :down]
        tensor = tensor.unfold(2, side, step)[:, :, :right]
        return tensor.permute(0, 1, 2, 3, 5, 6, 4).flatten(4, 5).flatten(0, 2)

    found = attention(cut(query, margin, step), cut(key, 0, size), cut(value, 0, size))
    found = found.transpose(1, 2).unflatten(1, (step, step)).unflatten(0, (-1, down, right))
    found = found.transpose(2, 3).flatten(3, 4).flatten(1, 2)
    return found[:, :height, :width]


def flex(height: int, width: int, device: str = "cuda") -> Run:
    """FlexAttention over pixels in the order of 8×8 tiles, compiled; sides of multiples of 16."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    step, margin, size = WINDOWS.stride, WINDOWS.halo, WINDOWS.size
    across, down = width // 8, height // 8

    def place(at: Tensor) -> tuple[Tensor, Tensor]:
        tile, within = at // 64, at % 64
        return tile // across * 8 + within // 8, tile % across * 8 + within % 8

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        (qy, qx), (ky, kx) = place(query), place(key)
        top, left = qy // step * step - margin, qx // step * step - margin
        seen = (ky >= top) & (ky < top + size)
        return seen & (kx >= left) & (kx < left + size)

    # Blocks of 128 tokens are two tiles side by side; a mask over all pairs would be too large.
    blocks = down * across // 2
    index = torch.arange(blocks, device=device)
    row, column = index * 2 // across, index * 2 % across
    found = []
    for dy in range(-3, 4):  # 20 pixels up and 27 down from a tile's first row
        for dx in range(-4, 5, 2):
            y, x = row + dy, column + dx
            good = (y >= 0) & (y < down) & (x >= 0) & (x < across)
            found.append(torch.where(good, (y * across + x) // 2, -1))
    all_of = torch.stack(found, 1)
    order = (all_of < 0).int().argsort(dim=1, stable=True)
    indices = all_of.gather(1, order).clamp_min(0).int()
    counts = (all_of >= 0).sum(1).int()
    counts, indices = counts[None, None], indices[None, None]
    # Who may see whom is the same both ways; PyTorch would find that out by a matrix of all pairs.
    mask = BlockMask(
        seq_lengths=(height * width, height * width),
        kv_num_blocks=counts,
        kv_indices=indices,
        full_kv_num_blocks=None,
        full_kv_indices=None,
        q_num_blocks=counts,
        q_indices=indices,
        full_q_num_blocks=None,
        full_q_indices=None,
        BLOCK_SIZE=(128, 128),
        mask_mod=sees,
    )
    compiled = torch.compile(flex_attention, dynamic=False)

    def tiled(tensor: Tensor) -> Tensor:
        pieces = tensor.unflatten(2, (across, 8)).unflatten(1, (down, 8))
        return pieces.transpose(2, 3).flatten(1, 4).transpose(1, 2).contiguous()

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        result = compiled(tiled(query), tiled(key), tiled(value), block_mask=mask)
        pieces = result.transpose(1, 2).unflatten(1, (down, across, 8, 8))
        return pieces.transpose(2, 3).flatten(3, 4).flatten(1, 2)

    return run


def natten(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Neighborhoods of 33×33 pixels."""
    from natten import na2d  # pyright: ignore[reportMissingImports]

    return na2d(query, key, value, kernel_size=33)


def seconds(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Clock time of each, between events, in turns."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 3):
        for name, run in runs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            # The GPU waits until Python has issued all, as in a model of many layers.
            torch.cuda._sleep(_WAIT_CYCLES)
            start.record()
            run()
            end.record()
            end.synchronize()
            if turn >= 3:
                taken[name].append(start.elapsed_time(end) / 1000)
    return taken


def product_rate() -> float:
    """bf16 products and sums a second, of matrices of 8192 × 8192, as this GPU computes them."""
    one, other = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    taken = seconds({"product": lambda: one @ other}, 10)["product"]
    return 2 * 8192**3 / statistics.median(taken)


def roofline_seconds(side: int, heads: int, dim: int, passes: float, rate: float) -> float:
    """The least time at a rate of products per second, and of 16 exponentials per clock."""
    facts = torch.cuda.get_device_properties(0)
    scores = heads * side**2 * WINDOWS.size**2
    clock = facts.clock_rate * 1000
    exponentials = scores / (16 * facts.multi_processor_count * clock)
    return max(passes * 4 * dim * scores / rate, exponentials)


def main() -> None:
    """Measure what is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sides", type=int, nargs="+", default=[1024, 2048])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--fresh", action="store_true", help="drop earlier rows")
    options = parser.parse_args()
    results = ResultFile(
        "attention_gpu",
        fresh=options.fresh,
        packages=["triton"],
        about="Halo windows on a GPU, forward and with backward.",
    )
    rate = product_rate()
    for side in options.sides:
        for heads, dim in ((2, 32), (1, 64)):
            # Or after eight shapes and modes FlexAttention would be run uncompiled, by a matrix.
            torch.compiler.reset()
            ways: dict[str, Run] = {
                "triton": kernel,
                "portable": portable,
                "unfold and SDPA": unfolded,
                "FlexAttention": flex(side, side),
            }
            if importlib.util.find_spec("natten"):
                ways["NATTEN, windows of 33"] = natten
            compare(results, ways, side, (heads, dim), options.rounds, rate)


def row_of(name: str, what: str, side: int, shape: tuple[int, int]) -> str:
    """The name of a row."""
    return f"{name}, {what}, {side}², {shape[0]} heads of {shape[1]}"


def compare(
    results: ResultFile,
    ways: dict[str, Run],
    side: int,
    shape: tuple[int, int],
    rounds: int,
    rate: float,
) -> None:
    """Rows of all ways for one size, forward and with backward."""
    if all(results.has(row_of(name, "with backward", side, shape)) for name in ways):
        return
    tensors = [
        torch.randn(1, side, side, *shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)
    ]
    exact = kernel(*(t.float() for t in tensors))
    given = torch.randn_like(tensors[0])
    leaves = [t.clone().requires_grad_() for t in tensors]

    def training(run: Run) -> Callable[[], object]:
        return lambda: torch.autograd.grad(run(*leaves), leaves, given)

    def inference(run: Run) -> Callable[[], object]:
        def call() -> None:
            with torch.inference_mode():
                run(*tensors)

        return call

    for name, way in list(ways.items()):
        try:
            training(way)()
        except Exception as error:  # noqa: BLE001 - a row says what a package cannot do here
            del ways[name]
            results.add(
                f"{name}, {side}², {shape[0]} heads of {shape[1]}",
                way=name,
                side=side,
                error=str(error)[:200],
            )
    for what, wrap, passes in (("forward", inference, 1), ("with backward", training, 3.5)):
        taken = seconds({name: wrap(run) for name, run in ways.items()}, rounds)
        least = roofline_seconds(side, *shape, passes, rate)
        for name, all_of in taken.items():
            middle = statistics.median(all_of)
            with torch.inference_mode():
                error = float((ways[name](*tensors) - exact).abs().max())
            results.add(
                row_of(name, what, side, shape),
                way=name,
                what=what,
                side=side,
                heads=shape[0],
                head_dim=shape[1],
                wall_s=middle,
                wall_min_s=min(all_of),
                wall_max_s=max(all_of),
                largest_difference=error,
                roofline_s=least,
                share_of_roofline=least / middle,
                products_per_s=rate,
            )


if __name__ == "__main__":
    main()
