"""The library of native/otaro.h, built for the tests."""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "src" / "otaro" / "kernels" / "csrc"
CORE = [*(ROOT / "native" / f"{name}.cpp" for name in ("files", "json", "model", "sha256", "shard", "text", "tokenizer")),
        *(CSRC / f"{name}.cpp" for name in ("decoder", "pool", "portable", "select"))]  # fmt: skip
INCLUDES = [f"-I{folder}" for folder in (ROOT / "native", CSRC, CSRC.parent / "shared")]


@pytest.fixture(scope="session")
def compiler() -> str:
    found = shutil.which(os.environ.get("CXX", "c++"))
    if found is None:
        pytest.skip("there is no C++ compiler on this machine")
    return found


@pytest.fixture(scope="session")
def library_path(compiler, tmp_path_factory) -> Path:
    """libotaro.so of the plain backend: a few seconds."""
    target = tmp_path_factory.mktemp("native") / "libotaro.so"
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-pthread"]
    if os.environ.get("OTARO_SANITIZE"):
        flags += ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g1"]
    subprocess.run([compiler, *flags, *INCLUDES, *CORE, "-o", target], check=True)
    return target


@pytest.fixture(scope="session")
def library(library_path) -> ctypes.CDLL:
    found = ctypes.CDLL(str(library_path))
    pointer = ctypes.c_void_p
    for name, kind in {
        "new": pointer,
        "open": pointer,
        "error": ctypes.c_char_p,
        "forward": ctypes.POINTER(ctypes.c_float),
        "vocabulary": ctypes.c_size_t,
        "length": ctypes.c_size_t,
        "tokenizer_new": pointer,
        "tokenizer_error": ctypes.c_char_p,
        "encode": ctypes.c_ssize_t,
        "piece": pointer,
    }.items():
        getattr(found, f"otaro_{name}").restype = kind
    return found
