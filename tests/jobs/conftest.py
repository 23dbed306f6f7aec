"""What jobs need: known costs of the bundled models, small pictures, and a reference."""

import numpy as np
import pytest


@pytest.fixture(scope="module", autouse=True)
def quick(private_cache):
    from support.measured_costs import quick_jobs

    yield from quick_jobs()


@pytest.fixture(scope="session")
def model():
    import lowtide

    return lowtide.load("lowtide-x2")


@pytest.fixture(scope="session")
def expected(model):
    """The picture that the plain model makes of an array, rounded to its own type."""
    import torch

    def run(array: np.ndarray) -> np.ndarray:
        peak = np.iinfo(array.dtype).max
        image = torch.from_numpy(array.astype(np.float32) / peak).permute(2, 0, 1)[None]
        if array.shape[2] == 1:
            result = model(image.expand(-1, 3, -1, -1)).mean(1, keepdim=True)
        else:
            result = model(image)
        return np.rint(result[0].permute(1, 2, 0).numpy() * peak).astype(array.dtype)

    return run


@pytest.fixture(scope="session")
def crop(photo):
    """A piece of the photograph, (100, 120, 3), at a third of its size: no blocks of a JPEG."""
    return photo[60:360:3, 200:560:3]


@pytest.fixture
def source(tmp_path, save, crop):
    return save(tmp_path / "photo.png", crop)


@pytest.fixture(scope="session")
def unmeasured(tmp_path_factory):
    """A model file that no machine has costs of; its receptive field reaches 5 pixels."""
    import torch
    from spandrel.architectures.Compact import Compact

    torch.manual_seed(3)
    path = tmp_path_factory.mktemp("unmeasured") / "compact.pth"
    torch.save({"params": Compact(num_feat=128, num_conv=3, upscale=2).state_dict()}, path)
    return path


@pytest.fixture
def run(source, tmp_path):
    """Upscale the small picture (or ``given``) with these options; returns its report."""

    import lowtide

    def upscale(name="out.png", given=None, **options):
        options = {"budget": "256MiB", **options}
        return lowtide.upscale(given or source, tmp_path / name, **options).images[0]

    return upscale


@pytest.fixture(scope="module")
def weights(tmp_path_factory, private_cache):
    """A file of a small denoiser with random weights."""
    from support.denoiser_files import denoiser_file

    return denoiser_file(tmp_path_factory.mktemp("denoiser") / "small.safetensors")


@pytest.fixture(scope="module")
def noisy(photo):
    """A piece of the photograph with noise of 25, (41, 59, 3)."""
    noise = np.random.default_rng(0).normal(0, 25, (41, 59, 3))
    return np.rint((photo[100:141, 200:259] + noise).clip(0, 255)).astype(np.uint8)
