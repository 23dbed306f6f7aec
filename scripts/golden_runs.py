"""Inputs and runs of `golden.py`: every job once, small, from files that are made here."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyvips

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))


@dataclass(frozen=True)
class Run:
    """Commands in one folder, each in a process of its own.

    A word with ``{}`` is a file of the inputs; a command that begins with ``python:`` is a script.
    Where ``killed``, the command is first killed as soon as it has written a picture.
    """

    name: str
    commands: tuple[str, ...]
    killed: bool = False


STREAM = (
    "import numpy, torch, lowtide; model = lowtide.load('{model}').module.eval(); "
    "x = torch.rand(1, 3, 96, 80, generator=torch.Generator().manual_seed(0)); "
    "numpy.save('streamed.npy', lowtide.stream(model, budget='48MiB')(x).numpy()); "
    "numpy.save('whole.npy', model(x).detach().numpy())"
)
FIT = (
    "import numpy, torch, lowtide, diffusers; torch.set_grad_enabled(False); "
    "vae = diffusers.AutoencoderKL.from_pretrained('{kl}').eval(); "
    "z = torch.randn(1, 4, 40, 40, generator=torch.Generator().manual_seed(0)); "
    "numpy.save('whole.npy', vae.decode(z).sample.numpy()); "
    "lowtide.fit(vae, budget='64MiB'); "
    "numpy.save('fitted.npy', vae.decode(z).sample.numpy())"
)
LARGE = (
    "import sys, numpy, torch, lowtide; sys.path.append('%(benchmarks)s'); "
    "from streaming_models import given, made; torch.set_grad_enabled(False); "
    "model, image = made('%(name)s'), given('%(name)s', %(height)d, %(width)d); %(run)s; "
    "numpy.save('result.npy', run(image).numpy())"
)
WHOLE = "torch.save(model.state_dict(), 'model.pth'); run = lowtide.load('model.pth')"


def runs() -> tuple[Run, ...]:
    """All small ones."""

    def one(name: str, *commands: str) -> Run:
        return Run(name, commands)

    up, dn = "upscale -q --json -o", "denoise -q --json -o"
    return (
        one("photo, default", f"{up} o.png {{photo.jpg}}"),
        one("photo, large model, tiled", f"{up} o.png -m lowtide-large-x2 --tile 64 {{photo.png}}"),
        one("photo, tiles of 4", f"{up} o.png --tile 48 --tile-batch-size 4 {{photo.png}}"),
        one("photo, streamed", f"{up} o.png --strategy streamed --budget 64MiB {{photo.png}}"),
        one("photo, x3 of x4", f"{up} o.png -s 3 {{photo.png}}"),
        one("photo, self-ensemble", f"{up} o.png --self-ensemble {{photo.png}}"),
        one("photo, bf16", f"{up} o.png --precision bf16 {{photo.png}}"),
        one("photo, JPEG", f"{up} o.jpg {{photo.jpg}}"),
        one("photo, WebP", f"{up} o.webp {{photo.jpg}}"),
        one("16 bits, TIFF", f"{up} o.tif {{deep.png}}"),
        one("alpha", f"{up} o.png {{alpha.png}}"),
        one("large photo, small budget", f"{up} o.png --budget 40MiB {{large.png}}"),
        one("transformer, whole", f"{up} o.png -m {{swinir.pth}} --strategy whole {{photo.png}}"),
        one(
            "transformer, streamed",
            f"{up} o.png -m {{swinir.pth}} --strategy streamed --budget 200MiB {{photo.png}}",
        ),
        one("transformer, tiled", f"{up} o.png -m {{swinir.pth}} --tile 64 {{photo.png}}"),
        one("folder", f"{up} out/ --suffix _x2 {{folder}}"),
        one("folder, two workers", f"{up} out/ --devices cpu,cpu {{folder}}"),
        Run("folder, killed and resumed", (f"{up} out/ --streams 1 {{folder}}",), killed=True),
        one(
            "ONNX",
            "export onnx -q -o m.onnx lowtide-x2",
            f"{up} o.png -m m.onnx {{photo.png}}",
        ),
        one(
            "ONNX, 8 bits",
            "export onnx -q --precision int8 --calibrate {photo.png} -o m.onnx lowtide-x2",
            f"{up} o.png -m m.onnx {{photo.png}}",
        ),
        one("video", "video -q --json -o o.mkv --codec ffv1 {clip.mkv}"),
        one("video, x264", "video -q --json -o o.mp4 --segment 4 {clip.mkv}"),
        one("noise, estimated", f"{dn} o.png {{noisy.png}}"),
        one("noise, two steps", f"{dn} o.png --sigma 25 --steps 2 {{noisy.png}}"),
        one("noise, streamed", f"{dn} o.png --sigma 25 --strategy streamed {{noisy.png}}"),
        one("RAW, linear", f"{dn} o.tif {{raw.dng}}"),
        one("RAW, developed", f"{dn} o.png --raw-output developed {{raw.dng}}"),
        one("volume", f"{dn} o.nii.gz {{volume.nii}}"),
        one("forecast", "forecast -o f.csv --samples-output s.csv --horizon 24 --json {table.csv}"),
        one("backtest", "backtest -q --json -o b.csv --horizon 12 --stride 24 {table.csv}"),
        one(
            "latents",
            "vae encode -q --json -o l.safetensors -m {wan} --budget 256MiB {clip.mkv}",
            "vae decode -q --json -o v.mkv --codec ffv1 -m {wan} --budget 256MiB l.safetensors",
        ),
        one("stream", f"python:{STREAM.replace('{model}', '{swinir.pth}')}"),
        one("fit", f"python:{FIT}"),
        one("training, resumed", *(_training(steps) for steps in (4, 8))),
        one("plan", "plan upscale --json {large.png} --budget 40MiB"),
    )


def large_runs() -> tuple[Run, ...]:
    """Networks of full depth, minutes each: streamed in MiB, or whole as a file has them.

    CRAFT is a trained one, in the folder LOWTIDE_DATA.
    """
    streamed = {"HAT": 1420, "DRCT": 855, "SwinIR": 573, "CRAFT": 295, "VAE decode": 2498}

    def one(name: str, height: int, width: int, how: str, run: str) -> Run:
        facts = {"benchmarks": ROOT / "benchmarks", "name": name, "run": run}
        script = LARGE % {**facts, "height": height, "width": width}
        return Run(f"{name} {height}×{width}, {how}", (f"python:{script}",))

    return (
        *(
            one(
                name,
                *((1024, 1024) if name.startswith("VAE") else (384, 512)),
                "streamed",
                f"run = lowtide.stream(model, budget='{mib}MiB')",
            )
            for name, mib in streamed.items()
        ),
        *(one(name, 128, 128, "whole", WHOLE) for name in ("DRCT", "HAT", "SwinIR")),
    )


def _training(steps: int) -> str:
    return (
        "train sr -q --json -o . --name t --scale 2 {pictures} --batch-size-per-gpu 2"
        f" --lq-size 16 --save-checkpoint-freq 4 --warmup-iter 2 --total-iter {steps}"
    )


def make_inputs(folder: Path) -> None:
    """Write the files that runs read; the same ones on every machine."""
    folder.mkdir(parents=True, exist_ok=True)
    makers: tuple[Callable[[Path], None], ...] = (_pictures, _models, _clip, _measured)
    for make in makers:
        make(folder)


def _photo(left: int, top: int, width: int, height: int) -> pyvips.Image:
    photo = pyvips.Image.new_from_file(str(ROOT / "examples" / "coffee.jpg"))
    return photo.crop(left, top, width, height)


def _pictures(folder: Path) -> None:
    photo = _photo(120, 60, 157, 113)
    photo.pngsave(str(folder / "photo.png"))
    photo.jpegsave(str(folder / "photo.jpg"), Q=85)
    _photo(0, 0, 600, 400).pngsave(str(folder / "large.png"))
    deep = photo.cast("ushort") * 257
    deep.cast("ushort").copy(interpretation="rgb16").pngsave(str(folder / "deep.png"), bitdepth=16)
    ramp = (pyvips.Image.xyz(photo.width, photo.height)[0] * 1.6).cast("uchar")
    photo.bandjoin(ramp).pngsave(str(folder / "alpha.png"))
    for name in ("folder", "pictures"):
        (folder / name).mkdir(exist_ok=True)
        for place in range(5):
            part = _photo(60 * place, 40 * place, 96 + 8 * place, 80)
            part.pngsave(str(folder / name / f"{place}.png"))
    noise = np.random.default_rng(0).normal(0, 25, (113, 157, 3))
    noisy = np.rint(photo.numpy() + noise).clip(0, 255).astype(np.uint8)
    pyvips.Image.new_from_array(noisy).pngsave(str(folder / "noisy.png"))


def _models(folder: Path) -> None:
    import torch
    from diffusers import AutoencoderKL, AutoencoderKLWan

    from support.stream_families import FAMILIES
    from support.tiny_autoencoders import KL, built

    torch.manual_seed(0)
    torch.save(FAMILIES["SwinIR"]().state_dict(), folder / "swinir.pth")
    built(AutoencoderKL, **KL).save_pretrained(folder / "kl")
    sizes = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 1], "num_res_blocks": 0}
    sizes |= {"temperal_downsample": [True], "scale_factor_temporal": 2, "scale_factor_spatial": 2}
    built(AutoencoderKLWan, **sizes).save_pretrained(folder / "wan")


def _clip(folder: Path) -> None:
    from support.video_clips import Clip, Sound

    Clip(frames=10, width=64, height=48, codec="ffv1", sounds=(Sound(seconds=0.4),)).write(
        folder / "clip.mkv"
    )


def _measured(folder: Path) -> None:
    import nibabel

    from support.nifti_files import brain
    from support.raw_files import BAYER, exposed, linear_light, mosaic_of, write_dng

    light = linear_light(_photo(120, 60, 160, 112).numpy())
    write_dng(folder / "raw.dng", exposed(mosaic_of(light, np.array(BAYER["RGGB"])), 8, 6))
    volume = brain((40, 36, 6))[..., 0] + np.random.default_rng(1).normal(0, 30, (40, 36, 6))
    nibabel.save(nibabel.Nifti1Image(volume.astype(np.float32), np.eye(4)), folder / "volume.nii")
    hours = np.arange(24 * 60)
    random = np.random.default_rng(2)
    rows = ["date,a,b"]
    for hour in hours:
        stamp = np.datetime64("2024-01-01T00") + np.timedelta64(int(hour), "h")
        wave = 10 + 3 * np.sin(2 * np.pi * hour / 24)
        values = wave + random.normal(0, 0.5), 2 * wave + hour / 200 + random.normal(0, 0.5)
        rows.append(f"{str(stamp).replace('T', ' ')}:00,{values[0]:.4f},{values[1]:.4f}")
    (folder / "table.csv").write_text("\n".join(rows) + "\n")


if __name__ == "__main__":
    make_inputs(Path(sys.argv[1]))
