"""Tables of measured operators in which nothing is known yet."""

import itertools
import os

from lowtide.memory.plan_store import StoredTable

_NUMBERS = itertools.count()


def empty_table() -> StoredTable:
    return StoredTable("operators", os.getpid(), next(_NUMBERS))
