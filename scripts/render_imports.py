"""Write CONTRIBUTING.md's table of which package may import which, from pyproject.toml.

    python scripts/render_imports.py [--check]

The contracts are those that ``lint-imports`` checks; what a package does is the first line of its
docstring. With ``--check`` nothing is written; if the table is out of date, the exit code is 1.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

from tables import NONE

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "CONTRIBUTING.md"

_BLOCK = re.compile(r"(<!-- imports -->\n).*?(<!-- /imports -->)", re.DOTALL)
HEAD = "| package | does | may import |\n| :-- | :-- | :-- |"


def table(contracts: list[dict[str, Any]]) -> str:
    """A row per package: what it does, and those below it less what a contract forbids."""
    layers, *others = contracts
    levels = [[name.strip() for name in level.split("|")] for level in layers["layers"]]
    rows = [HEAD]
    for number, level in enumerate(levels):
        below = [name for lower in levels[number + 1 :] for name in lower]
        for package in level:
            not_these = {
                name
                for contract in others
                if package in contract.get("source_modules", ())
                for name in contract["forbidden_modules"]
            }
            may = ", ".join(f"`{name.split('.')[1]}`" for name in below if name not in not_these)
            rows.append(f"| `{package}` | {does(package)} | {may or NONE} |")
    return "\n".join(rows)


def does(package: str) -> str:
    """The first line of a package's docstring, without its full stop."""
    source = ROOT.joinpath("src", *package.split("."), "__init__.py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0].removesuffix(".")


def rules(contracts: list[dict[str, Any]]) -> str:
    """The other contracts, a line each."""
    lines = []
    for contract in contracts:
        if contract["type"] == "forbidden":
            who, whom = (names(contract[f"{key}_modules"]) for key in ("source", "forbidden"))
            lines.append(f"- {contract['name']}: {who} may not import {whom}.")
        else:
            who, whom = names(contract["containers"]), names(contract["layers"])
            lines.append(f"- {contract['name']}: in {who}, each may import those after it: {whom}.")
    return "\n".join(lines)


def names(modules: list[str]) -> str:
    """Modules as code."""
    return ", ".join(f"`{module}`" for module in modules)


def main() -> int:
    """Write, or check, the block."""
    parser = argparse.ArgumentParser(description="The table of packages, from pyproject.toml.")
    parser.add_argument("--check", action="store_true", help="only say whether it is stale")
    check = parser.parse_args().check
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    body = f"\n{table(contracts)}\n\n{rules(contracts[1:])}\n\n"
    before = TARGET.read_text(encoding="utf-8")
    after, found = _BLOCK.subn(lambda match: match[1] + body + match[2], before)
    if not found:
        sys.exit(f"{TARGET.name} has no <!-- imports --> block")
    if before == after:
        return 0
    print(f"{TARGET.name}: {'out of date; run scripts/render_imports.py' if check else 'written'}")
    if not check:
        TARGET.write_text(after, encoding="utf-8")
    return int(check)


if __name__ == "__main__":
    sys.exit(main())
