"""Pickle reader that executes nothing, for the opcodes torch.save writes.

A pickle is a program: Python's unpickler imports and calls whatever it names. This reader knows the
opcodes that torch.save writes, and calls nothing. A name is on a short allowlist or refused; a
tensor becomes a reference to its storage. No opcode makes more than one small object, so that a
stream needs memory in proportion to its length.

PyTorch's `weights_only` reader refuses protocol 4 and common harmless names, and its memory has no
bound by the file's size: tuples that double one another never end.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from typing import Any

from lowtide.models.checkpoints.pickle_objects import (
    DamagedError,
    ForbiddenNameError,
    ObjectFactory,
    OpaqueObject,
    plain_key,
)

# The largest checkpoints, optimizer states included, have a few hundred thousand.
_MOST_INSTRUCTIONS = 2_000_000


def read_pickle(file: Any, maker: ObjectFactory) -> Any:
    """Read the object pickled at the file's position, without unpickling.

    ``read`` of ``file`` must not allocate past its end. Dictionaries, lists, tuples and plain
    values, with `TensorRef` for tensors and `OpaqueObject` for harmless objects. Subclasses of dict
    become dict. Raises `ForbiddenNameError` and `DamagedError`.
    """
    machine = _Machine(maker)
    try:
        return machine.run(file)
    except (ForbiddenNameError, DamagedError):
        raise
    except (ValueError, LookupError, TypeError, AttributeError, AssertionError) as error:
        # What a wrong order or count of opcodes raises here and in pickletools.
        raise DamagedError(f"its pickle is broken ({type(error).__name__})") from error


class _Machine:
    """Stack machine that interprets the opcodes in `_INSTRUCTIONS`."""

    def __init__(self, maker: ObjectFactory) -> None:
        self.maker = maker
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self, file: Any) -> Any:
        for done, (instruction, value, _) in enumerate(pickletools.genops(file)):
            if instruction.name == "STOP":
                return self.stack.pop()
            if done == _MOST_INSTRUCTIONS:
                raise DamagedError(f"it has more than {_MOST_INSTRUCTIONS} instructions")
            if instruction.name not in _INSTRUCTIONS:
                raise DamagedError(f"torch.save does not write the instruction {instruction.name}")
            _INSTRUCTIONS[instruction.name](self, value)
        raise DamagedError("its pickle has no STOP instruction")

    def pop_to_mark(self) -> list[Any]:
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def make_tuple(self, count: int) -> None:
        items = tuple(self.stack[-count:])
        if len(items) < count:
            raise DamagedError("a tuple lacks items")
        self.stack[-count:] = [items]

    def memoize(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is list:
            target.extend(items)
        elif type(target) is not OpaqueObject:
            raise DamagedError("it appends to an object that is not a list")

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is dict:
            for key, value in zip(items[::2], items[1::2], strict=True):
                target[plain_key(key)] = value
        elif type(target) is not OpaqueObject:
            raise DamagedError("it sets items of an object that is not a dictionary")

    def reduce(self, has_kwargs: bool = False) -> None:
        if has_kwargs:
            self.stack.pop()
        given = self.stack.pop()
        self.push(self.maker.build(self.stack.pop(), given))


_LITERALS = """
    INT BININT BININT1 BININT2 LONG1 BINFLOAT BINSTRING SHORT_BINSTRING BINUNICODE SHORT_BINUNICODE
    BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8
""".split()
_INSTRUCTIONS: dict[str, Callable[[_Machine, Any], Any]] = {
    **dict.fromkeys(_LITERALS, _Machine.push),
    **dict.fromkeys(("PROTO", "FRAME"), lambda machine, _: None),
    "NONE": lambda machine, _: machine.push(None),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "EMPTY_SET": lambda machine, _: machine.push(OpaqueObject("builtins.set")),
    "MARK": lambda machine, _: machine.marks.append(len(machine.stack)),
    "POP": lambda machine, _: machine.stack.pop(),
    "POP_MARK": lambda machine, _: machine.pop_to_mark(),
    "TUPLE": lambda machine, _: machine.push(tuple(machine.pop_to_mark())),
    "TUPLE1": lambda machine, _: machine.make_tuple(1),
    "TUPLE2": lambda machine, _: machine.make_tuple(2),
    "TUPLE3": lambda machine, _: machine.make_tuple(3),
    "APPEND": lambda machine, _: machine.extend([machine.stack.pop()]),
    "APPENDS": lambda machine, _: machine.extend(machine.pop_to_mark()),
    "ADDITEMS": lambda machine, _: machine.extend(machine.pop_to_mark()),
    "FROZENSET": lambda machine, _: machine.push(
        (machine.pop_to_mark(), OpaqueObject("frozenset"))[1]
    ),
    "SETITEM": lambda machine, _: machine.set_items([machine.stack.pop(-2), machine.stack.pop()]),
    "SETITEMS": lambda machine, _: machine.set_items(machine.pop_to_mark()),
    "BINGET": lambda machine, index: machine.push(machine.memo[index]),
    "LONG_BINGET": lambda machine, index: machine.push(machine.memo[index]),
    "BINPUT": _Machine.memoize,
    "LONG_BINPUT": _Machine.memoize,
    "MEMOIZE": lambda machine, _: machine.memoize(len(machine.memo)),
    "GLOBAL": lambda machine, value: machine.push(machine.maker.resolve_name(*value.split(" ", 1))),
    "STACK_GLOBAL": lambda machine, _: machine.push(
        machine.maker.resolve_name(machine.stack.pop(-2), machine.stack.pop())
    ),
    "REDUCE": lambda machine, _: machine.reduce(),
    "NEWOBJ": lambda machine, _: machine.reduce(),
    "NEWOBJ_EX": lambda machine, _: machine.reduce(has_kwargs=True),
    "BUILD": lambda machine, _: machine.stack.pop(),  # drop attributes: weights have none
    "BINPERSID": lambda machine, _: machine.push(
        machine.maker.resolve_storage(machine.stack.pop())
    ),
}
