"""Which failures mean that memory ran out."""

import pytest

from lowtide.memory.failures import is_out_of_memory


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
