"""Which failures mean that memory ran out."""

import pytest
import torch

from lowtide.memory import oom
from lowtide.memory.oom import is_out_of_memory


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes", True),
        ("could not create a primitive", True),
        ("could not create a memory object", True),
        ("could not create a primitive descriptor for the convolution", False),
        ("CUDA error: an illegal memory access was encountered", False),
    ],
)
def test_messages_of_the_libraries(text, verdict):
    assert is_out_of_memory(RuntimeError(text)) == verdict


def test_a_gpu_frees_what_its_allocator_caches_too(monkeypatch):
    given = []
    monkeypatch.setattr(oom, "trim_heap", lambda collect: given.append(("heap", collect)))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given.append("gpu"))
    oom.trim_allocators("cpu")
    assert given == [("heap", False)]
    oom.trim_allocators("cuda:0", collect=True)
    assert given[1:] == [("heap", True), "gpu"]
