"""The way of the data is also the way of the imports: nobody reaches back."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from otaro.errors import DISTRIBUTION, install

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "otaro"

# What each package may import from otaro besides itself and `errors`, which is everybody's.
MAY_IMPORT = {
    "errors": set(),
    "readable": set(),
    "tokens": set(),
    "packable": set(),
    "idle": set(),
    "_plugin": set(),
    "builtin": set(),
    "sefp": set(),
    "file": {"sefp", "builtin", "packable", "readable"},
    "export": {"sefp", "file", "packable"},
    "kernels": {"sefp", "file"},
    "runtime": {"sefp", "file", "kernels", "packable"},
    "serve": {"sefp", "file", "runtime", "(top)"},
    "web": {"sefp", "file", "runtime", "(top)"},
    "vllm": {"sefp", "file", "kernels", "runtime"},
    "evaluate": {"sefp", "file", "export", "kernels", "runtime", "readable", "tokens", "packable", "idle"},
    "calibrate": {"sefp", "file", "runtime", "tokens", "packable"},
    "tune": {"sefp", "builtin", "readable", "tokens", "packable"},
    "cli": {
        "sefp",
        "file",
        "export",
        "kernels",
        "runtime",
        "serve",
        "web",
        "evaluate",
        "calibrate",
        "tune",
        "builtin",
        "readable",
        "tokens",
        "packable",
        "idle",
        "(top)",
    },
    "__init__": {"sefp", "file", "runtime", "_plugin"},
    "__main__": {"cli"},
}


def imported_packages(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are written out in full"
            names = (
                [f"{node.module}.{alias.name}" for alias in node.names]
                if node.module == "otaro"
                else [node.module]
            )
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


def test_hints_say_how_to_install_this_package_and_not_its_namesake():
    """`otaro` on package registries is a stranger's: only the name in pyproject.toml is ours."""
    about = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert about["name"] == DISTRIBUTION
    for extra in about["optional-dependencies"]:
        assert install(extra).endswith(f" -m pip install '{DISTRIBUTION}[{extra}]'")
    files = [
        path for kind in ("*.py", "*.md", "*.sh") for path in ROOT.rglob(kind) if ".venv" not in path.parts
    ]
    for path in [*files, ROOT / "Makefile", ROOT / "pyproject.toml"]:
        assert not re.search(r"""pip install ['"]?otaro\b(?!-llm)|['"]otaro\[""", path.read_text()), path


@pytest.mark.parametrize(
    ("below", "shown"),
    [
        (".venv/bin/python", ".venv/bin/python"),
        ("my env/bin/python", "'my env/bin/python'"),
        ("python", "./python"),
        ("../python", "{parent}/python"),
    ],
)
def test_packages_are_installed_by_the_python_that_runs(tmp_path, monkeypatch, below, shown):
    """The shell's pip is another's where an environment has not been activated."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "executable", os.path.normpath(tmp_path / "here" / below))
    assert install("serve") == f"{shown.format(parent=tmp_path)} -m pip install 'otaro-llm[serve]'"


@pytest.mark.parametrize("module", ["otaro", "otaro.cli.main"])
def test_importing_needs_neither_torch_nor_transformers(module):
    script = (
        f"import {module}, sys; print([name for name in ('torch', 'transformers', 'numpy') if name in "
        "sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_test_that_is_left_out_says_why_in_words():
    calls = [
        (path.name, node)
        for path in (ROOT / "tests").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "importorskip"
    ]
    assert calls
    for name, call in calls:
        assert any(keyword.arg == "reason" for keyword in call.keywords), f"{name}:{call.lineno}"
