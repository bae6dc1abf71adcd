"""Our CUDA sources compiled for the CPU, as far as tests of small sizes need: see emulated.h.

`emulated.kernel` takes the place of `nvrtc.kernel`: tensors are in the host's memory then. Assembler is
replaced, function by function, by what emulated.h has under the same name.

What was compiled is kept in build/test-emulated, under the digest of all it was made of: the processes of a
run share it, and the next run has it already.
"""

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

from otaro.kernels import cuda_structs

MISSING = "" if shutil.which("g++") else "there is no g++ to compile the kernels for the CPU with"
_HERE = Path(__file__).parent
_FUNCTION = re.compile(
    r"(template <int (?P<given>\w+)>\n)?__device__ __forceinline__ (?P<kind>\w+) (?P<name>\w+)"
    r"\((?P<parameters>[^)]*(?:\(&\w+\)[^)]*)*)\) \{(?P<body>\n.*?\n\}|[^\n]*\})",
    re.DOTALL,
)
_LAUNCH = """
extern "C" bool launch_{name}(const void* p, const unsigned* grid, unsigned threads, unsigned shared) {{
  emulated::mark(shared);
  emulated::launch<const {struct}>({name}, p, grid, threads, {cluster});
  return emulated::marked(shared);
}}
"""
# Not optimized: most kernels run for less time than that would take. Fortify's check knows no fibers.
_COMPILER = ("g++", "-std=c++17", "-O0", "-ffp-contract=off", "-fPIC", "-w", "-U_FORTIFY_SOURCE")
_COMPILER += ("-g", "-fsanitize=address") if os.environ.get("OTARO_SANITIZE") else ()  # as .ci/sanitize asks


class Launch:
    """Made as one on a GPU is; streams are all the same."""

    def __init__(self, launch, grid, threads, shared, fields):
        self._launch, self._threads, self._shared, self.fields = launch, threads, shared, fields
        self._grid = (ctypes.c_uint * 3)(*(*grid, 1, 1)[:3])

    def __call__(self, stream=None):
        within = self._launch(ctypes.byref(self.fields), self._grid, self._threads, self._shared)
        assert within, f"the kernel wrote beyond the {self._shared} bytes of shared memory that it was given"

    on = __call__


class Kernel:
    """Called as a kernel on a GPU is."""

    def __init__(self, library, file, name):
        self._launch, self._parameters = (
            getattr(library, f"launch_{name}"),
            cuda_structs.parameters(file)[name],
        )
        self._launch.restype = ctypes.c_bool

    def __call__(self, grid, threads, shared=0, /, **fields):
        self.bound(grid, threads, shared, **fields)()

    def bound(self, grid, threads, shared=0, /, **fields):
        return Launch(self._launch, grid, threads, shared, cuda_structs.filled(self._parameters, fields))

    def blocks_per_multiprocessor(self, threads, shared=0):
        return 1

    def clusters(self, blocks, threads, shared=0):
        return 2


def kernel(file, name, device, **constants):
    """The kernel `name` of a source file, compiled for this CPU with these constants."""
    return Kernel(
        _library(file, name, tuple(sorted((key, int(value)) for key, value in constants.items()))), file, name
    )


@cache
def _folder():
    """Where kernels are kept, with emulated.h compiled ahead: the library's headers take longer."""
    headers = [_HERE / "emulated.h", *sorted(cuda_structs.FORMAT.parent.glob("*.h"))]
    made_of = [repr(_COMPILER).encode(), *(path.read_bytes() for path in headers)]
    folder = (
        _HERE.parents[1] / "build" / "test-emulated" / hashlib.sha256(b"\0".join(made_of)).hexdigest()[:16]
    )
    folder.mkdir(parents=True, exist_ok=True)
    _compile("", folder / "emulated.h.gch", "-x", "c++-header", _HERE / "emulated.h")
    return folder


def _compile(text, target, *options):
    """Unless it was done before; another process may be doing it."""
    if not target.exists():
        partial = target.with_name(f"{target.name}.{os.getpid()}")
        done = subprocess.run(
            [*_COMPILER, *options, "-o", partial], input=text, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[:4000]
        partial.replace(target)


@cache
def _library(file, name, constants):
    text = '#include "emulated.h"\n' + _with_headers(file, set())
    text = text.replace("extern __shared__ int4 buffer[];", "int4* buffer = emulated::own_shared();")
    struct, cluster = cuda_structs.parameters(file)[name].__name__, _clusters(text, dict(constants))
    text += cuda_structs.assertions(file) + _LAUNCH.format(name=name, struct=struct, cluster=cluster)
    flags = [f"-D{key}={value}" for key, value in constants]
    path = _folder() / (hashlib.sha256("\0".join([text, *flags]).encode()).hexdigest() + ".so")
    _compile(
        text,
        path,
        "-shared",
        f"-I{_folder()}",
        f"-I{_HERE}",
        f"-I{cuda_structs.FORMAT.parent}",
        *flags,
        "-x",
        "c++",
        "-",
    )
    return ctypes.CDLL(str(path))


def _with_headers(file, seen):
    """A source without assembler, and each of our headers where it is included first."""

    def header(match):
        return "" if match[1] in seen else seen.add(match[1]) or _with_headers(match[1], seen)

    source = _without_assembler((cuda_structs.SOURCES / file).read_text()).replace("#pragma once", "")
    return re.sub(r'#include "(\w+\.cuh)"', header, source)


def _clusters(source, constants):
    """Blocks of a cluster."""
    found = re.search(r"\bkCluster = (\w+)", source)
    return int(constants.get(found[1], found[1])) if found else 1


def _without_assembler(source):
    def replaced(match):
        if "asm" not in match["body"]:
            return match.group(0)
        name, parameters, given = match["name"], match["parameters"], match["given"]
        names = [re.search(r"\(&(\w+)\)|(\w+)$", one.strip()) for one in parameters.split(",") if one.strip()]
        arguments = ", ".join(one.group(1) or one.group(2) for one in names)
        template, constant = (f"template <int {given}> ", f"<{given}>") if given else ("", "")
        return (
            f"{template}inline {match['kind']} {name}({parameters}) {{ return "
            f"assembler::{name}{constant}({arguments}); }}"
        )

    return _FUNCTION.sub(replaced, source)
