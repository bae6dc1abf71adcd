"""The decoder as WebAssembly, by zig from the sources that are in the package: once, for they are kept by
their hash.

Nothing of the sources is changed. `wasm/` has what zig's standard library lacks there (threads, mutexes,
exceptions), in a few lines each, and the names of standard headers.
"""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import otaro
from otaro.errors import OtaroError, install
from otaro.file.atomic import new_file
from otaro.web import cache

ONE, MANY = "decoder.wasm", "decoder-threads.wasm"
"""For one thread, and for several."""

_HERE = Path(__file__).parent
_KERNELS = _HERE.parent / "kernels"
_CORE = ("json", "model", "sha256", "shard")
_KERNEL_FILES = ("decoder", "pool", "portable", "select", "wasm")
_EXPORTS = [
    *(
        f"otaro_{name}"
        for name in ("new", "describe", "add_shard", "free", "error", "set_precision", "precision", "finest")
    ),
    *(
        f"otaro_{name}"
        for name in ("forward", "vocabulary", "length", "positions", "truncate", "set_threads", "backend")
    ),
    *("otaro_web_pages", "malloc", "free"),
]
_FLAGS = [
    *("-target", "wasm32-wasi", "-mexec-model=reactor", "-std=c++17", "-O3", "-DNDEBUG", "-s"),
    "-msimd128",  # plain vectors: the relaxed ones do not give the same bits everywhere
    "-ffp-contract=off",
    "-fno-threadsafe-statics",  # all of them are made by the first thread
    "-Wl,-z,stack-size=1048576",
    "-Wl,--initial-memory=4194304",  # engine.js: PAGES
]
_THREADS = [
    *(
        "-matomics",
        "-mbulk-memory",
        "-Wl,--shared-memory",
        "-Wl,--import-memory",
        "-Wl,--max-memory=4294901760",
    ),
    *(
        f"-Wl,--export={name}"
        for name in ("otaro_web_thread", "__wasm_init_tls", "__tls_size", "__stack_pointer")
    ),
]


def _native() -> Path:
    """The sources of otaro.h: packages have them here, a checkout has them at its root."""
    packaged = _HERE / "native"
    return packaged if packaged.is_dir() else _HERE.parents[2] / "native"


def _sources() -> list[Path]:
    files = [_native() / f"{name}.cpp" for name in _CORE]
    return [
        *files,
        *(_KERNELS / "csrc" / f"{name}.cpp" for name in _KERNEL_FILES),
        _HERE / "wasm" / "entry.cpp",
    ]


def _includes() -> list[Path]:
    return [_HERE / "wasm" / "std", _native(), _KERNELS / "csrc", _KERNELS / "shared"]


def _read() -> Iterator[Path]:
    """Every file that a build may read."""
    yield from _sources()
    for folder in _includes():
        yield from sorted(path for path in folder.iterdir() if path.is_file() and path.suffix in ("", ".h"))


def build(name: str) -> Path:
    """The module of that name, compiled now or before."""
    flags = [*_FLAGS, *(f"-Wl,--export={one}" for one in _EXPORTS), *(_THREADS if name == MANY else [])]
    version = _zig_version()
    digest = hashlib.sha256("\n".join([version, *flags]).encode())
    for path in _read():
        digest.update(f"{path.name}\n".encode() + path.read_bytes())
    target = cache.folder() / digest.hexdigest()[:16] / name
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with new_file(target, overwrite=True) as out:
        includes = [f"-I{folder}" for folder in _includes()]
        command = [
            sys.executable,
            "-m",
            "ziglang",
            "c++",
            *flags,
            *includes,
            *map(str, _sources()),
            "-o",
            str(out),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            said = done.stderr.strip() or "it says nothing"
            reason = next((line for line in said.splitlines() if "error" in line), said)
            raise OtaroError(
                f"zig {version} could not compile the decoder of otaro {otaro.__version__}: {reason}"
            )
    return target


def _zig_version() -> str:
    if importlib.util.find_spec("ziglang") is None:
        raise OtaroError(f"pages need zig to compile the decoder; install it with: {install('web')}")
    done = subprocess.run([sys.executable, "-m", "ziglang", "version"], capture_output=True, text=True)
    if done.returncode:
        raise OtaroError(
            f"zig is installed, but does not run here: {done.stderr.strip()}; try {install('web')} again"
        )
    return done.stdout.strip()
