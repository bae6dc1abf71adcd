"""The library of native/otaro.h, built for the tests."""

import ctypes
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "src" / "otaro" / "kernels" / "csrc"
CORE = [
    *(
        ROOT / "native" / f"{name}.cpp"
        for name in ("files", "json", "model", "sha256", "shard", "text", "tokenizer")
    ),
    *(CSRC / f"{name}.cpp" for name in ("decoder", "pool", "portable", "select")),
]
SOURCES = (ROOT / "native", CSRC, CSRC.parent / "shared")
INCLUDES = [f"-I{folder}" for folder in SOURCES]


@pytest.fixture(scope="session")
def compiler() -> str:
    found = shutil.which(os.environ.get("CXX", "c++"))
    if found is None:
        pytest.skip("there is no C++ compiler on this machine")
    return found


@pytest.fixture(scope="session")
def library_path(compiler) -> Path:
    """libotaro.so of the plain backend: some seconds, unless it was built of the same sources before."""
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-pthread"]
    if os.environ.get("OTARO_SANITIZE"):
        flags += ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g1"]
    sources = sorted(path for folder in SOURCES for path in folder.iterdir() if path.suffix in (".cpp", ".h"))
    content = hashlib.sha256(
        repr((compiler, flags, [path.read_bytes() for path in sources])).encode()
    ).hexdigest()
    target = ROOT / "build" / "test-native" / content[:16] / "libotaro.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(f".{os.getpid()}")
        subprocess.run([compiler, *flags, *INCLUDES, *CORE, "-o", partial], check=True)
        partial.rename(target)
    return target


@pytest.fixture(scope="session")
def library(library_path) -> ctypes.CDLL:
    found = ctypes.CDLL(str(library_path))
    pointer = ctypes.c_void_p
    for name, kind in {
        "new": pointer,
        "open": pointer,
        "error": ctypes.c_char_p,
        "damaged": ctypes.c_char_p,
        "forward": ctypes.POINTER(ctypes.c_float),
        "vocabulary": ctypes.c_size_t,
        "length": ctypes.c_size_t,
        "trained_positions": ctypes.c_size_t,
        "tokenizer_new": pointer,
        "tokenizer_error": ctypes.c_char_p,
        "encode": ctypes.c_ssize_t,
        "piece": pointer,
    }.items():
        getattr(found, f"otaro_{name}").restype = kind
    return found
