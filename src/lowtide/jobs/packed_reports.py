"""A list of items' reports that takes little memory."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Iterable, MutableSequence
from typing import Any, TypeVar, get_args, overload

from pydantic import BaseModel, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

Report = TypeVar("Report", bound=BaseModel)


class PackedReports(MutableSequence[Report]):
    """A list of reports, in half a KiB each where their objects take 20.

    Pydantic's objects keep a dict and a set each, in pages of Python's heap that the next run
    cannot use: over hundreds of images they outgrew what a light network takes. Reports of one job
    are alike, so the first one is the dictionary for compressing the others.

    Each access makes a new object: a changed report has to be assigned to its index.
    """

    def __init__(self, reports: Iterable[Report] = ()) -> None:
        self._first = b""
        self._packed: list[bytes] = []
        self.extend(reports)

    def insert(self, index: int, value: Report) -> None:
        """Insert a report before ``index``."""
        self._packed.insert(index, self._pack(value))

    def _pack(self, report: Report) -> bytes:
        data = pickle.dumps(report, pickle.HIGHEST_PROTOCOL)
        self._first = self._first or data
        packer = zlib.compressobj(zdict=self._first)
        return packer.compress(data) + packer.flush()

    def _unpack(self, data: bytes) -> Report:
        # Only what `_pack` made is read.
        return pickle.loads(zlib.decompressobj(zdict=self._first).decompress(data))

    @overload
    def __getitem__(self, index: int) -> Report: ...

    @overload
    def __getitem__(self, index: slice) -> list[Report]: ...

    def __getitem__(self, index: int | slice) -> Report | list[Report]:
        """Return the report at an index, or a list of those of a slice."""
        if isinstance(index, slice):
            return [self._unpack(data) for data in self._packed[index]]
        return self._unpack(self._packed[index])

    def __setitem__(self, index: Any, value: Any) -> None:
        """Replace the report at an index, or those of a slice."""
        many = isinstance(index, slice)
        self._packed[index] = [self._pack(one) for one in value] if many else self._pack(value)

    def __delitem__(self, index: int | slice) -> None:
        """Remove the report at an index, or those of a slice."""
        del self._packed[index]

    def __len__(self) -> int:
        """Return the number of reports."""
        return len(self._packed)

    def __eq__(self, other: object) -> bool:
        """Return whether ``other`` is a list of equal reports."""
        if not isinstance(other, list | PackedReports):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    def __repr__(self) -> str:
        """Return the text of a list of the reports."""
        return repr(list(self))

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Read and write a field of this type as a list."""
        (item,) = get_args(source)
        as_list = core_schema.wrap_serializer_function_ser_schema(
            lambda reports, dump: dump(list(reports)), schema=handler(list[item])
        )
        return core_schema.no_info_after_validator_function(
            cls, handler(list[item]), serialization=as_list
        )
