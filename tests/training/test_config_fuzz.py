"""Configurations that somebody mistyped, or made to do harm: read, or refused by name, at once."""

import copy
import random
import tempfile
from pathlib import Path

import pytest
import yaml

from lowtide import LowtideError
from lowtide.cli.train_sr import example
from lowtide.training.tasks.sr_config import SrConfig
from support.fuzz_workers import run_all

CASES = 300
MIB = 1 << 20
TOKENS = [
    "*a",
    "&a ",
    "&a [*a]",
    "<<: *a\n",
    "<<: [*a, *a]\n",
    "[",
    "]",
    "{",
    "}",
    "- ",
    "? ",
    ": ",
    "|\n",
    ">-\n",
    "'",
    '"',
    "#",
    "!!int ",
    "!!float ",
    "!!null x",
    "!!binary ",
    "!!set {a}",
    "!!omap ",
    "!!python/name:os.system",
    "!x ",
    "9" * 5000,
    "0x" + "f" * 9000,
    "1" + ":59" * 3000,
    ".inf",
    "-.nan",
    "1e999",
    "~",
    "\t",
    "%YAML 9.9\n",
    "---\n",
    "...\n",
    "\ufeff",
    "\u2028",
    "\0",
    '"\\ud800"',
    '"\\Uffffffff"',
    '"\\x00"',
    "2024-99-99",
    "true",
    "- - - - ",
    "a: " * 60,
    "[" * 3000,
    "{" * 3000,
    "k" * 20_000,
    "../..",
    "/etc/passwd",
    "C:\\",
]
VALUES = [
    None,
    True,
    -1,
    0,
    2**63,
    -(2**70),
    1e308,
    1e-320,
    float("inf"),
    float("nan"),
    "",
    "..",
    "a/b",
    "\0",
    "x" * 5000,
    [],
    [[]],
    {},
    {"a": {"b": [1]}},
    [None],
    "1e5",
    "0x10",
    b"bytes",
    {"type": 3},
]


def _typed(text: str, chance: random.Random) -> bytes:
    """A file in which some places were mistyped."""
    for _ in range(chance.randint(1, 3)):
        at, more = chance.randrange(len(text) + 1), chance.randrange(12)
        token = chance.choice([*TOKENS, "", chr(chance.randrange(32, 0x2FF))])
        text = text[:at] + token + text[at + more * chance.randrange(2) :]
        if chance.random() < 0.3:
            lines = text.splitlines(keepends=True)
            lines.insert(chance.randrange(len(lines)), chance.choice(lines))
            text = "".join(lines)
    data = bytearray(text.encode("utf-8", "surrogatepass"))
    for _ in range(chance.choice([0, 0, 0, 1, 5])):
        data[chance.randrange(len(data))] = chance.randrange(256)
    return bytes(data)


def _valued(given: dict, chance: random.Random) -> bytes:
    """A file whose form is right and some of whose values are not."""
    given = copy.deepcopy(given)
    for _ in range(chance.randint(1, 3)):
        part = given
        while chance.random() < 0.7:
            inner = [one for one in part.values() if isinstance(one, dict) and one]
            if not inner:
                break
            part = chance.choice(inner)
        name = chance.choice([*part, "new", 5, None, True])
        part[name] = copy.deepcopy(chance.choice(VALUES))
    return yaml.safe_dump(given, sort_keys=False).encode()


def _bomb(chance: random.Random) -> bytes:
    """A few lines that stand for much: aliases, merges, or levels."""
    form = chance.choice(["[%s]", "{<<: [%s]}", "{k: [%s], j: 1}"])
    wide, high = chance.randint(2, 12), chance.randint(3, 40)
    rows = [f"a0: &a0 {chance.choice(['[x]', '{k: 1}'])}"]
    rows += [
        f"a{row}: &a{row} " + form % ", ".join([f"*a{row - 1}"] * wide) for row in range(1, high)
    ]
    deep = chance.choice(["", "[" * 10 ** chance.randint(1, 5), "- " * 10 ** chance.randint(1, 4)])
    return "\n".join([*rows, example(), f"x: {deep}"]).encode()


def made(seed: int) -> bytes:
    chance = random.Random(seed)
    kind = chance.random()
    if kind < 0.15:
        return _bomb(chance)
    return _typed(example(), chance) if kind < 0.6 else _valued(yaml.safe_load(example()), chance)


def read(seed: int) -> tuple[str, int]:
    """What became of a configuration, and bytes of memory that reading it took at most."""
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yml"
        path.write_bytes(made(seed))
        try:
            SrConfig.from_file(path).model_dump_json()  # as it is kept
            found = "config"
        except LowtideError as error:
            found = type(error).__name__
            assert "config.yml" in error.message
            assert len(error.message) < 3000
    return found, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


@pytest.mark.slow
def test_a_configuration_or_an_error_by_name():
    pytest.importorskip("resource", reason="measures memory as Unix does")
    outcomes = run_all(read, range(CASES), seconds=30)
    faults = [f"{one.case}: {one.fault}" for one in outcomes if one.fault]
    assert not faults, "\n".join(faults)
    found = [one.result[0] for one in outcomes]
    assert len(found) == CASES
    assert {"config", "UsageError"} == set(found)
    assert max(one.result[1] for one in outcomes) < 100 * MIB
