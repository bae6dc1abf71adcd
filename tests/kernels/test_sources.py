"""What C++ and CUDA share is said once, and agrees with Python."""

import re
import shutil
import subprocess

import pytest

from otaro.file.planes import BASE_BYTES, BLOCK, PLANE_BYTES, PLANES
from otaro.kernels import keyvalues, nvrtc, reference
from otaro.sefp import codec
from otaro.sefp.precision import COARSEST, FINEST

FORMAT = nvrtc.HEADERS[1]
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
    "kMinCacheExponent": keyvalues.MIN_EXPONENT,
    "kMaxCacheExponent": keyvalues.MAX_EXPONENT,
}


@pytest.mark.skipif(not shutil.which("g++"), reason="there is no g++")
def test_the_limits_of_the_kernels_are_those_of_python(tmp_path):
    source = tmp_path / "limits.cpp"
    checks = "".join(f"static_assert(otaro::{name} == {value});\n" for name, value in PYTHON.items())
    compiled = ["g++", "-std=c++17", "-fsyntax-only", f"-I{FORMAT.parent}", str(source)]
    source.write_text(f'#include "{FORMAT.name}"\n{checks}')
    assert subprocess.run(compiled, capture_output=True).returncode == 0
    source.write_text(f'#include "{FORMAT.name}"\n{checks.replace(f"kLanes == {reference.LANES}", "kLanes == 8")}')
    assert b"kLanes" in subprocess.run(compiled, capture_output=True).stderr


def test_a_limit_is_written_down_in_one_file():
    folders = (nvrtc.SOURCES, FORMAT.parent, nvrtc.SOURCES.parent / "csrc")
    for name in PYTHON:
        where = [path.name for folder in folders for path in folder.iterdir() if re.search(rf"\b{name} = ", path.read_text())]
        assert where == [FORMAT.name], name
