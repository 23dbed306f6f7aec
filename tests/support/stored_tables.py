"""Tables of measured operators in which nothing is known yet."""

import itertools
import os

from lowtide.memory.plan_store import JsonCacheTable

_NUMBERS = itertools.count()


def empty_table() -> JsonCacheTable:
    return JsonCacheTable("operators", os.getpid(), next(_NUMBERS))
