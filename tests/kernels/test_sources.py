"""What C++ and CUDA share is said once, and agrees with Python."""

import ctypes
import re
import shutil
import subprocess

import pytest
import torch

from otaro.errors import KernelError
from otaro.file.planes import BASE_BYTES, BLOCK, PLANE_BYTES, PLANES
from otaro.kernels import cuda_structs, kv_cache, reference
from otaro.sefp import codec
from otaro.sefp.precision import COARSEST, FINEST

FORMAT = cuda_structs.FORMAT
PYTHON = {
    "kBlock": BLOCK,
    "kBaseBytes": BASE_BYTES,
    "kPlaneBytes": PLANE_BYTES,
    "kPlanes": len(PLANES),
    "kCoarsest": COARSEST,
    "kFinest": FINEST,
    "kLanes": reference.LANES,
    "kMaxActivation": reference.MAX_ACTIVATION,
    "kActivationBits": reference.ACTIVATION_BITS,
    "kMinActivationExponent": reference.MIN_ACTIVATION_EXPONENT,
    "kMinScaleExponent": codec.MIN_SCALE_EXPONENT,
    "kMaxScaleExponent": codec.MAX_SCALE_EXPONENT,
    "kMinCacheExponent": kv_cache.MIN_EXPONENT,
    "kMaxCacheExponent": kv_cache.MAX_EXPONENT,
}


needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="there is no g++")
PROBE = """
constexpr int kTwo = 2;
struct Inner {
  const float* x;  // a comment; with a semicolon
  int *y, *z;
};
struct Probe {
  Inner inner[kTwo + 1];
  int count, sizes[kTwo];
  int64_t stride;
  float scale;
};
extern "C" __global__ void probe(const __grid_constant__ Probe p) {}
"""


def compiles(folder, text):
    """Whether g++ takes it, and what it says."""
    source = folder / "source.cpp"
    source.write_text(f'#include "{FORMAT.name}"\n#define __global__\n#define __grid_constant__\n{text}')
    done = subprocess.run(
        ["g++", "-std=c++17", "-fsyntax-only", f"-I{FORMAT.parent}", source], capture_output=True, text=True
    )
    return done.returncode == 0, done.stderr


@needs_compiler
def test_the_limits_of_the_kernels_are_those_of_python(tmp_path):
    checks = "".join(f"static_assert(otaro::{name} == {value});\n" for name, value in PYTHON.items())
    assert compiles(tmp_path, checks)[0]
    assert "kLanes" in compiles(tmp_path, checks.replace(f"kLanes == {reference.LANES}", "kLanes == 8"))[1]


def test_a_limit_is_written_down_in_one_file():
    folders = (cuda_structs.SOURCES, FORMAT.parent, cuda_structs.SOURCES.parent / "csrc")
    for name in PYTHON:
        where = [
            path.name
            for folder in folders
            for path in folder.iterdir()
            if re.search(rf"\b{name} = ", path.read_text())
        ]
        assert where == [FORMAT.name], name


@pytest.fixture
def probe(tmp_path, monkeypatch):
    """The file of a kernel that takes one of everything."""
    (tmp_path / "probe.cu").write_text(PROBE)
    monkeypatch.setattr(cuda_structs, "SOURCES", tmp_path)
    caches = (cuda_structs.text, cuda_structs.structure, cuda_structs.parameters, cuda_structs.assertions)
    yield "probe.cu"
    for one in caches:
        one.cache_clear()


@needs_compiler
@pytest.mark.parametrize(
    ("was", "becomes"),
    [
        ("*y, *z", "*y, z"),
        ("kTwo + 1", "kTwo"),
        ("  float scale;\n", ""),
        ("int64_t stride;\n  float scale;", "float scale, stride;"),
    ],
)
def test_a_field_that_was_changed_does_not_compile(tmp_path, probe, was, becomes):
    facts = cuda_structs.assertions(probe)
    assert compiles(tmp_path, PROBE + facts)[0]
    taken, said = compiles(tmp_path, PROBE.replace(was, becomes) + facts)
    assert not taken
    assert "static assertion failed" in said or "has no member" in said


def test_fields_are_filled_by_name(probe):
    kind, x = cuda_structs.parameters(probe)["probe"], torch.zeros(1)
    fields = {
        "inner": [{"x": x, "y": None, "z": 5}],
        "count": 7,
        "sizes": (8, 9),
        "stride": 1 << 40,
        "scale": 0.5,
    }
    made = cuda_structs.filled(kind, fields)
    assert (made.inner[0].x, made.inner[0].y, made.inner[0].z, made.inner[2].x) == (
        x.data_ptr(),
        None,
        5,
        None,
    )
    assert (made.count, list(made.sizes), made.stride, made.scale) == (7, [8, 9], 1 << 40, 0.5)
    assert ctypes.sizeof(made) == 3 * 24 + 12 + 4 + 8 + 8


def test_a_field_too_many_or_too_few_is_refused(probe):
    kind = cuda_structs.parameters(probe)["probe"]
    fields = {"inner": [], "count": 7, "sizes": (), "stride": 1, "scale": 0.5}
    cuda_structs.filled(kind, fields)
    with pytest.raises(KernelError, match=r"Probe was given too much or too little: more$"):
        cuda_structs.filled(kind, fields | {"more": 1})
    del fields["scale"]
    with pytest.raises(KernelError, match=r"too little: scale$"):
        cuda_structs.filled(kind, fields)
    with pytest.raises(TypeError):
        cuda_structs.filled(kind, fields | {"scale": 1.0, "count": 0.5})


@pytest.mark.parametrize("file", sorted(path.name for path in cuda_structs.SOURCES.glob("*.cu")))
def test_every_source_says_what_its_kernels_take(file):
    kernels = re.findall(r"__global__[^{]*?(\w+)\(const __grid_constant__", cuda_structs.text(file))
    assert kernels
    assert list(cuda_structs.parameters(file)) == kernels
