"""One name for one idea: no class name twice in the house."""

import ast
from collections import defaultdict
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "lowtide"


def test_no_class_has_the_name_of_another():
    homes = defaultdict(list)
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(f"{path.relative_to(SOURCE)}:{node.lineno}")
    assert not {name: places for name, places in homes.items() if len(places) > 1}
