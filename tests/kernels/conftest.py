"""What the tests of the kernels share."""

from __future__ import annotations

import pytest

from . import SANITIZED
from .packed import backends, use


@pytest.fixture(params=backends())
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every backend in turn."""
    use(request.param, monkeypatch)
    return request.param


@pytest.fixture
def installed() -> None:
    """Child processes and compilers know nothing of another build."""
    if SANITIZED:
        pytest.skip("this test is about the installed extension, not about the one with sanitizers")
