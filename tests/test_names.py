"""One name for one idea, and no circles: the house as a whole."""

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


def test_no_two_modules_import_each_other():
    """Types and imports in functions count too: a circle has no beginning to read from."""
    root = SOURCE.parent
    modules = {
        ".".join(path.relative_to(root).with_suffix("").parts): path
        for path in SOURCE.rglob("*.py")
        if path.name != "__init__.py"
    }
    imports = {name: _imported(path, modules) - {name} for name, path in modules.items()}
    while free := [name for name, others in imports.items() if not others & imports.keys()]:
        for name in free:
            del imports[name]
    assert not imports, sorted(imports)


def _imported(path, modules):
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{one.name}" for one in node.names)}
        elif isinstance(node, ast.Import):
            found |= {one.name for one in node.names}
    return found & modules.keys()
