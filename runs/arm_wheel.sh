#!/usr/bin/env bash
# usage: runs/arm_wheel.sh [FOLDER]
#
# Build the package's wheel for Linux on ARM (aarch64) into FOLDER (default: dist), cross-compiled by the same
# CMake file, with the headers of the Python that $PYTHON names (default: .venv/bin/python, which has
# scikit-build-core and nanobind), and check that the extension in it is one for ARM that has all three
# instruction sets. Needs Debian's g++-aarch64-linux-gnu, or a compiler that $CROSS_CXX names.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/shared.sh"
one_at_most "$@"
cd "$root"
folder=${1:-dist} python=${PYTHON:-.venv/bin/python} cross=${CROSS_CXX:-aarch64-linux-gnu-g++}
command -v "$cross" >/dev/null || die "there is no $cross; Debian has it in g++-aarch64-linux-gnu"
version=$("$python" -c 'import sys; print("%d%d" % sys.version_info[:2])')
include=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')
rm -f "$folder"/otaro_llm-*aarch64.whl
PATH=$PATH:$root/.venv/bin _PYTHON_HOST_PLATFORM=linux-aarch64 \
    SETUPTOOLS_EXT_SUFFIX=.cpython-$version-aarch64-linux-gnu.so \
    "$python" -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$folder" . \
    --config-settings build-dir=build/arm/wheel --config-settings cmake.define.CMAKE_SYSTEM_NAME=Linux \
    --config-settings cmake.define.CMAKE_SYSTEM_PROCESSOR=aarch64 \
    --config-settings cmake.define.CMAKE_CXX_COMPILER="$cross" \
    --config-settings cmake.define.Python_INCLUDE_DIR="$include"
"$python" - "$folder" <<'END'
import sys
import zipfile
from pathlib import Path

(wheel,) = Path(sys.argv[1]).glob("otaro_llm-*aarch64.whl")
with zipfile.ZipFile(wheel) as inside:
    names = [
        name for name in inside.namelist() if name.startswith("otaro/kernels/_cpu") and name.endswith(".so")
    ]
    if len(names) != 1:
        said = "`pip wheel --verbose .` says why"
        sys.exit(f"error: {wheel.name} has no extension, or several: {names}; {said}")
    data = inside.read(names[0])
machine = int.from_bytes(data[18:20], "little")
if data[:4] != b"\x7fELF" or machine != 183:
    sys.exit(f"error: {names[0]} is not for aarch64: ELF machine {machine}, not 183")
# As backends call themselves.
missing = [name for name in ("neon", "dotprod", "i8mm") if f"\0{name}\0".encode() not in data]
if missing:
    sys.exit(f"error: {names[0]} lacks {', '.join(missing)}")
print(f"{wheel.name}: {names[0]}, ELF for aarch64, {len(data)} bytes, with NEON, SDOT and I8MM")
END
