"""The stub of the C++ extension says what is in it; mypy checks what calls it by that."""

import ast

import pytest

from otaro.kernels import cpu
from runs.stubs import STUB, generated

pytestmark = pytest.mark.skipif(cpu._cpu is None, reason=f"no extension: {cpu.MISSING}")


def test_the_stub_is_what_nanobind_would_write_now():
    pytest.importorskip("nanobind", reason="nanobind writes the stub")
    assert ast.dump(ast.parse(STUB.read_text())) == ast.dump(ast.parse(generated())), "run `make stubs`"
