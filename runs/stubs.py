"""Writes src/otaro/kernels/_cpu.pyi, what the C++ extension offers, from the extension: `make stubs`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

STUB = Path(__file__).parents[1] / "src" / "otaro" / "kernels" / "_cpu.pyi"


def generated() -> str:
    """The stub of the extension that is installed, as nanobind writes it."""
    from nanobind.stubgen import StubGen

    from otaro.kernels import _cpu

    stubs = StubGen(_cpu)
    stubs.put(_cpu)
    return str(stubs.get())


if __name__ == "__main__":
    STUB.write_text(generated())
    subprocess.run([sys.executable, "-m", "ruff", "format", "--quiet", str(STUB)], check=True)
