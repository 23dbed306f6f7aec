"""Train the bundled denoiser, from photographs out of scikit-image.

    nice -n 15 python scripts/train_denoiser.py --steps 7500
    nice -n 15 python scripts/train_denoiser.py --start 7500 --steps 9000

The second line goes on from the weights of the first, with its learning rate anew. Samples are
patches of `training_photographs.PHOTOS` at several sizes with noise of a sigma up to 60 of 255 at
mid-gray: half of them Gaussian, half Poisson-Gaussian; a quarter clipped to 8 bits as a camera's
file is, half of them gray; from step 7500 on a fifth have an area of one color, as medical images,
drawings and margins do. Every number is drawn by Philox from (seed, step).

Then ``lowtide-denoise.safetensors``, its log and its card are written into the package's weights
folder (or ``--output``), and the hash to pin in `lowtide.models.bundled` is printed. Nothing held
out is read before that.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch
from denoiser_card import card
from denoiser_recipe import (
    CONFIG,
    COOLDOWN,
    DECAY,
    GRADIENT_LIMIT,
    NAME,
    RATE,
    SEED,
    WARMUP,
    WEIGHT_DECAY,
    Samples,
)
from torch import Tensor
from train_bundled import training_parser, write_weights

import lowtide.models
from lowtide.models.denoiser.denoiser import Denoiser, preconditioning_terms
from lowtide.models.denoiser.slim_unet import SlimUNet
from lowtide.training.setup import EMAModel

LOG_EVERY = 100


def loss_of(
    network: SlimUNet, clean: Tensor, noisy: Tensor, sigma: Tensor, share: Tensor
) -> Tensor:
    """Return the mean squared error of the clean image, relative to the noise.

    At a tenth of the noise the best error is about a tenth too, so that all levels count alike.
    """
    terms = [preconditioning_terms(CONFIG.prediction, level) for level in sigma.tolist()]
    shrunk, kept, made = torch.tensor(terms)[..., None, None, None].unbind(1)
    found = network(
        (noisy * shrunk).contiguous(memory_format=torch.channels_last),
        network.modulation(sigma, share),
    )
    errors = (kept * noisy + made * found - clean).square().mean((1, 2, 3))
    return (errors / (sigma + 0.01)).mean()


def rate_at(step: int, steps: int) -> float:
    """Return the share of the learning rate: a warm-up, level, and a linear decay at the end."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    return min(1, (steps - step) / (steps * COOLDOWN))


def train(
    steps: int, start: int = 0, state: dict[str, Tensor] | None = None
) -> tuple[SlimUNet, list[dict[str, float]]]:
    """Train from step ``start`` on, and return the averaged network and the log."""
    torch.manual_seed(SEED)
    network = SlimUNet(CONFIG)
    if state is not None:
        network.load_state_dict(state)
    network = network.to(memory_format=torch.channels_last)
    average, samples, log = EMAModel(network), Samples(), []
    optimizer = torch.optim.AdamW(
        network.parameters(), RATE, betas=(0.9, 0.99), weight_decay=WEIGHT_DECAY
    )
    total, started = 0.0, time.process_time()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * rate_at(step, steps)
        loss = loss_of(network, *samples.batch(start + step))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), GRADIENT_LIMIT)
        optimizer.step()
        average.update(network, min(DECAY, step / (step + 10)))
        total += loss.item()
        if (step + 1) % LOG_EVERY == 0:
            seconds = round(time.process_time() - started, 1)
            log.append(
                {"step": start + step + 1, "loss": total / LOG_EVERY, "cpu_seconds": seconds}
            )
            print(log[-1], flush=True)
            total = 0.0
    module = average.module
    assert isinstance(module, SlimUNet)
    return module, log


def keep(network: SlimUNet, start: int, log: list[dict[str, float]], folder: Path) -> None:
    """Write weights, log and card."""
    path = folder / f"{NAME}.safetensors"
    denoiser = Denoiser(CONFIG)
    denoiser.unet.load_state_dict(network.state_dict())
    state = {name: one.half().contiguous() for name, one in denoiser.state_dict().items()}
    digest = write_weights(path, state, CONFIG)
    lines = "".join(json.dumps(row) + "\n" for row in log)
    path.with_suffix(".jsonl").write_text(lines, encoding="utf-8")
    denoiser = lowtide.models.load(path).module
    assert isinstance(denoiser, Denoiser)
    runs = [f"--steps {start}", f"--start {start} --steps {round(log[-1]['step']) - start}"]
    made_by = " and ".join(
        f"`scripts/train_denoiser.py {one}`" for one in (runs if start else runs[1:])
    )
    text = card(denoiser, made_by, log, digest)
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text[text.index("## Scores") :])


def main() -> None:
    """Train, and keep what was trained."""
    parser = training_parser("Train the bundled denoiser.")
    parser.add_argument("--steps", type=int, default=7500)
    parser.add_argument(
        "--start", type=int, default=0, help="go on from the weights of so many steps in --output"
    )
    options = parser.parse_args()
    state, before = None, []
    if options.start:
        path = options.output / f"{NAME}.safetensors"
        earlier = lowtide.models.load(path).module
        assert isinstance(earlier, Denoiser)
        state = earlier.unet.state_dict()
        before = [json.loads(line) for line in path.with_suffix(".jsonl").open(encoding="utf-8")]
        if before[-1]["step"] != options.start:
            parser.error(f"{path} has {before[-1]['step']} steps")
    network, log = train(options.steps, options.start, state)
    for row in log:
        row["cpu_seconds"] += before[-1]["cpu_seconds"] if before else 0
    keep(network, options.start, before + log, options.output)


if __name__ == "__main__":
    main()
