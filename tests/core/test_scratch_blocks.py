"""Scratch on disk: blocks that are used again, what stays, and a full disk."""

import copy
import errno
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest

from lowtide import OutputError
from lowtide.core import scratch
from lowtide.core.scratch import BLOCK_BYTES, ScratchBlockPool, ScratchSpace


def filled(blocks, number, value, size=100):
    blocks.write(number, 7, memoryview(bytes([value]) * size))
    return number


def read(blocks, number, size=100):
    found = bytearray(size)
    blocks.read(number, 7, memoryview(found))
    return found


def test_blocks_do_not_share_bytes(tmp_path):
    blocks = ScratchBlockPool(tmp_path)
    taken = [filled(blocks, blocks.allocate(), value) for value in range(5)]
    assert len(set(taken)) == 5
    assert [read(blocks, one) for one in taken] == [bytearray([value] * 100) for value in range(5)]
    assert not list(tmp_path.iterdir())  # it has no name


def test_freed_blocks_are_reused_before_the_file_grows():
    blocks = ScratchBlockPool()
    taken = [blocks.allocate() for _ in range(4)]
    blocks.free(taken[1:3])
    assert sorted(blocks.allocate() for _ in range(2)) == taken[1:3]
    assert blocks.allocate() == 4


def test_only_so_much_stays_of_a_file_that_nobody_uses(monkeypatch):
    monkeypatch.setattr(scratch, "_MAX_KEPT_BYTES", 2 * BLOCK_BYTES)
    blocks = ScratchBlockPool()
    taken = [filled(blocks, blocks.allocate(), 1) for _ in range(4)]
    blocks.free(taken[:3])
    assert size_of(blocks) > 3 * BLOCK_BYTES
    blocks.free(taken[3:])
    assert size_of(blocks) == 2 * BLOCK_BYTES
    again = [filled(blocks, blocks.allocate(), value) for value in range(3)]
    assert again == [0, 1, 2]
    assert [read(blocks, one) for one in again] == [bytearray([value] * 100) for value in range(3)]


def size_of(blocks):
    return blocks._file._file.seek(0, 2)


def test_threads_have_blocks_of_their_own():
    blocks = ScratchBlockPool()

    def use(value):
        for _ in range(50):
            number = filled(blocks, blocks.allocate(), value, BLOCK_BYTES - 7)
            assert read(blocks, number, BLOCK_BYTES - 7) == bytes([value]) * (BLOCK_BYTES - 7)
            blocks.free([number])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(use, range(4)))


def test_after_a_full_disk_there_are_new_blocks(monkeypatch):
    space = ScratchSpace()
    blocks = space.blocks()
    number = filled(blocks, blocks.allocate(), 1)
    assert space.blocks() is blocks

    class Full:
        def __getattr__(self, name):
            return getattr(real, name)

        def write(self, data):
            raise OSError(errno.ENOSPC, "No space left on device")

    real = blocks._file._file
    monkeypatch.setattr(blocks._file, "_file", Full())
    with pytest.raises(OutputError, match="disk is full"):
        filled(blocks, number, 2)
    blocks.free([number])  # by a page that closes after the error
    new = space.blocks()
    assert new is not blocks
    assert read(new, filled(new, new.allocate(), 3)) == bytearray([3] * 100)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_of_a_space_is_in_the_same_folder_and_has_blocks_of_its_own(tmp_path, again):
    space = ScratchSpace(tmp_path / "none")
    with pytest.raises(OutputError, match="could not create a scratch file"):
        again(space).blocks()
    space = ScratchSpace()
    assert again(space).blocks() is not space.blocks()
