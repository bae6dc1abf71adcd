"""The way of the data is also the way of the imports: nobody reaches back."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "otaro"

# What each package may import from otaro besides itself and `errors`, which is everybody's.
MAY_IMPORT = {
    "errors": set(),
    "readable": set(),
    "tokens": set(),
    "_plugin": set(),
    "builtin": set(),
    "sefp": set(),
    "file": {"sefp", "builtin"},
    "kernels": {"sefp", "file"},
    "runtime": {"sefp", "file", "kernels"},
    "evaluate": {"sefp", "file", "kernels", "runtime", "readable", "tokens"},
    "tune": {"sefp", "builtin", "readable", "tokens"},
    "cli": {"sefp", "file", "kernels", "runtime", "evaluate", "tune", "builtin", "readable", "tokens", "(top)"},
    "__init__": {"sefp", "file", "runtime", "_plugin"},
}


def imported_packages(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are written out in full"
            names = [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "otaro" else [node.module]
        else:
            continue
        for name in names:
            first, _, rest = name.partition(".")
            if first == "otaro":
                found.add(rest.split(".")[0] or "(top)")
    return found


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_one_way(path):
    package = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    allowed = MAY_IMPORT[package] | {package, "errors"}
    assert imported_packages(path) <= allowed


def test_the_table_of_packages_is_complete():
    packages = {path.relative_to(SOURCE).parts[0].removesuffix(".py") for path in SOURCE.rglob("*.py")}
    assert packages == set(MAY_IMPORT)


@pytest.mark.parametrize("module", ["otaro", "otaro.cli.main"])
def test_importing_needs_neither_torch_nor_transformers(module):
    script = f"import {module}, sys; print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
