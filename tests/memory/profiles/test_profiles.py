"""Device profiles: their data, and those of devices that are there."""

import json
import subprocess
import sys
from dataclasses import replace
from importlib import resources

import pytest
import torch
from pydantic import ValidationError

from lowtide import UsageError
from lowtide.core.units import GIB, MIB
from lowtide.memory.process_memory import total_host_bytes
from lowtide.memory.profiles import DeviceProfile, load_profile, local_profile, profile_names
from lowtide.memory.profiles.profile import GpuDriverFacts, profile_from_driver
from support.gpu_attention import ADA, HOPPER, HOST

FILES = sorted(
    entry.name for entry in (resources.files("lowtide.memory.profiles") / "data").iterdir()
)


SOURCED = set(
    """
    multiprocessors total_bytes context_bytes desktop_bytes workspaces.cublas workspaces.conv
    bandwidth_bytes_per_s flops pcie_bytes_per_s
    """.split()
)


def read(file: str) -> dict:
    return json.loads((resources.files("lowtide.memory.profiles") / "data" / file).read_text())


@pytest.mark.parametrize("file", FILES)
def test_every_file_is_a_profile_of_that_name_and_says_where_figures_come_from(file):
    profile = DeviceProfile.model_validate(read(file))
    assert file == f"{profile.name}.json" and profile.name in profile_names()
    assert set(profile.provenance) == SOURCED - (
        {"pcie_bytes_per_s"} if file == "cpu.json" else set()
    )
    assert {one["kind"] for one in profile.provenance.values()} <= {"known", "datasheet", "prior"}
    assert all(len(one["source"]) > 8 for one in profile.provenance.values())
    assert set(profile.flops) == set(profile.supports)
    assert (profile.kind == "cuda") == (profile.compute_capability is not None)


def test_an_unknown_figure_is_refused():
    with pytest.raises(ValidationError, match="Extra inputs"):
        DeviceProfile.model_validate({**read("rtx4090-24gb.json"), "memory": "24 GB"})


@pytest.mark.parametrize("name", [name for name in profile_names() if name != "cpu"])
def test_gpu_profiles_are_plausible(name):
    gpu = load_profile(name)
    nominal = int(name.rpartition("-")[2].removesuffix("gb"))
    # The driver keeps up to 5 % for itself; data center GPUs are sold by powers of ten.
    assert 0.95 * nominal * (GIB if nominal < 100 else 10**9) < gpu.total_bytes <= nominal * GIB
    assert 200 * MIB <= gpu.context_bytes <= gpu.context_upper_bytes <= GIB
    assert gpu.desktop_bytes + gpu.context_upper_bytes < 0.4 * gpu.total_bytes
    assert gpu.workspaces.cublas_bytes in (8320 * 1024, 32 * MIB)
    assert gpu.pcie_bytes_per_s and 8 * gpu.pcie_bytes_per_s < gpu.bandwidth_bytes_per_s
    # fp32 rate is two operations for each of 128 lanes a cycle, at clocks of 1 to 3 GHz.
    lanes = 2 * 128 * gpu.multiprocessors
    assert 1e9 < gpu.flops["fp32"] / lanes < 3e9
    assert gpu.flops["fp16"] == gpu.flops["bf16"] >= 2 * gpu.flops["tf32"]
    assert gpu.flops["tf32"] >= gpu.flops["fp32"]


def test_names_are_in_order_of_size_and_found_in_any_spelling():
    assert profile_names()[:2] == ("cpu", "laptop-6gb") and profile_names()[-1] == "h200-141gb"
    spellings = ("rtx4090-24gb", "rtx4090", "RTX 4090", "NVIDIA GeForce RTX 4090 24 GB")
    assert {load_profile(text).name for text in spellings} == {"rtx4090-24gb"}
    assert load_profile("h200") is load_profile("H200")


def test_an_unknown_name_lists_the_names_and_the_closest():
    with pytest.raises(UsageError, match="rtx4080") as caught:
        load_profile("rtx4080-16gb")
    assert all(name in caught.value.message for name in profile_names())
    assert caught.value.hint == "did you mean rtx4060-8gb?"
    with pytest.raises(UsageError) as caught:
        load_profile("abacus")
    assert "did you mean" not in caught.value.hint


def test_profiles_are_read_without_torch():
    program = (
        "import sys; from lowtide.memory.profiles import load_profile, local_profile;"
        "load_profile('rtx3060'); local_profile('cpu'); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_convolution_scratch_is_a_multiple_with_a_cap():
    space = ADA.workspaces
    assert space.conv_bytes(100 * MIB) == (100 * MIB, 200 * MIB)
    assert space.conv_bytes(100 * MIB, channels_last=True) == (int(12.5 * MIB), 200 * MIB)
    assert space.conv_bytes(9 * GIB) == (space.conv_cap_bytes, space.conv_cap_bytes)
    assert HOPPER.workspaces.blas_bytes == (32 * MIB, 33 * MIB)


def test_the_host_is_measured():
    host = local_profile("cpu")
    assert host.total_bytes == total_host_bytes()
    assert host.context_bytes == 0
    assert host.flops["fp32"] == HOST.flops["fp32"] * host.multiprocessors // HOST.multiprocessors


def test_a_known_gpu_keeps_its_profile_and_takes_the_drivers_memory():
    facts = GpuDriverFacts("NVIDIA GeForce RTX 3070", (8, 6), 8 * GIB, 46)
    gpu = profile_from_driver(facts)
    assert gpu.name == "rtx3070-8gb" and gpu.total_bytes == 8 * GIB
    assert gpu.flops == load_profile("rtx3070").flops
    # A GPU of that name with other memory is another GPU.
    other = profile_from_driver(replace(facts, total_bytes=16 * GIB))
    assert other.name == "nvidia-geforce-rtx-3070" and other.flops == gpu.flops


def test_an_unknown_gpu_takes_scaled_priors_of_the_nearest():
    facts = GpuDriverFacts("NVIDIA H100 PCIe", (9, 0), 79 * GIB, 114, 2_000_000_000_000)
    gpu = profile_from_driver(facts)
    assert gpu.workspaces == HOPPER.workspaces
    assert gpu.flops["bf16"] == pytest.approx(HOPPER.flops["bf16"] * 114 / 132)
    assert gpu.bandwidth_bytes_per_s == 2_000_000_000_000


def test_a_gpu_before_ampere_has_no_bf16():
    gpu = profile_from_driver(GpuDriverFacts("Tesla T4", (7, 5), 15 * GIB, 40))
    assert gpu.supports == ("fp32", "fp16")
    assert set(gpu.flops) == {"fp32", "fp16"}


@pytest.mark.parametrize(
    ("device", "complaint"), [("mps", "no device profile"), ("cuda:99", "there is no device")]
)
def test_devices_that_are_not_there(device, complaint):
    with pytest.raises(UsageError, match=complaint):
        local_profile(device)


@pytest.mark.gpu
def test_the_gpu_is_recognized(gpu):
    properties = torch.cuda.get_device_properties(0)
    assert gpu.total_bytes == properties.total_memory
    assert gpu.capability == (properties.major, properties.minor)
