"""spandrel is imported without torchvision, which its two users of it still get."""

import subprocess
import sys

import pytest

# What a user of torchvision expects of it, at any time.
REAL = """
import torchvision.transforms.functional as real
from torchvision.transforms import InterpolationMode
assert real.InterpolationMode is InterpolationMode
assert real.rotate.__module__ == real.__name__ == "torchvision.transforms.functional"
"""
LOAD = """
import sys
from lowtide.models.spandrel_files import family_names
assert {"LaMa", "RestoreFormer", "ESRGAN"} <= set(family_names())
"""
LIGHT = """
assert not {"torchvision", "torch._dynamo"} & set(sys.modules)
"""
LAMA = """
import torch
from spandrel.architectures.LaMa.__arch import LaMa
image = torch.rand(1, 3, 24, 20)
result = LaMa.rotate(image, 30.0, LaMa.InterpolationMode.BILINEAR, fill=0)
import torchvision.transforms.functional as real
assert torch.equal(result, real.rotate(image, 30.0, real.InterpolationMode.BILINEAR, fill=0))
network = LaMa.LaMa(in_nc=4, out_nc=3).eval()
with torch.inference_mode():
    painted = network(torch.rand(1, 3, 32, 32), torch.zeros(1, 1, 32, 32))
assert painted.shape == (1, 3, 32, 32) and painted.isfinite().all()
"""
RESTORE_FORMER = """
import torch
from spandrel import ModelLoader
from spandrel.architectures.RestoreFormer import RestoreFormer
torch.manual_seed(0)
sizes = dict(n_embed=8, embed_dim=32, ch=32, ch_mult=(1, 1, 1, 1, 1, 1), num_res_blocks=1)
module = RestoreFormer(**sizes, z_channels=32, head_size=8).eval()
found = ModelLoader().load_from_state_dict(module.state_dict()).eval()
image = torch.rand(1, 3, 64, 64)
with torch.inference_mode():
    result = found(image)
    expected = (module(image * 2 - 1)[0] + 1) / 2
assert (result - expected.clamp(0, 1)).abs().max() < 1e-5
"""
THREADS = """
import threading
failed = []
def attempt(code):
    try:
        exec(code, {})
    except BaseException as error:
        failed.append(error)
threads = [threading.Thread(target=attempt, args=(code,)) for code in (LOAD, REAL, LOAD, REAL)]
for one in threads:
    one.start()
for one in threads:
    one.join()
assert not failed, failed
"""


@pytest.mark.parametrize(
    "parts",
    [
        (LOAD, LIGHT, REAL, RESTORE_FORMER),
        (LOAD, LIGHT, LAMA),
        (REAL, LOAD, LAMA, RESTORE_FORMER),
        (f"LOAD, REAL = {LOAD!r}, {REAL!r}", THREADS, LAMA, RESTORE_FORMER),
    ],
    ids=["RestoreFormer", "LaMa", "torchvision first", "threads"],
)
def test_torchvision_waits_for_its_first_use(parts):
    done = subprocess.run([sys.executable, "-c", "".join(parts)], capture_output=True, text=True)
    assert not done.returncode, done.stderr
