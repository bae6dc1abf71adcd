"""What the tests of the kernels share."""

from __future__ import annotations

import os

import pytest

from .packed import backends, use

SANITIZED = "OTARO_CPU_MODULE" in os.environ


@pytest.fixture(params=backends(with_reference=not SANITIZED))
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every backend in turn; sanitizers look at the extension alone."""
    use(request.param, monkeypatch)
    return request.param


@pytest.fixture
def installed() -> None:
    """Child processes and compilers know nothing of another build, and what torch asks of an operation is
    slow to ask.
    """
    if SANITIZED:
        pytest.skip("this test is about the installed extension, not about the one with sanitizers")
