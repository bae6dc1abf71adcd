#!/usr/bin/env bash
# What clang makes of the code for ARM: Apple's compiler is one, and there is no Mac here.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

usage() {
    cat <<END
usage: runs/clang_arm.sh [--few]

Compile with zig's clang (the package ziglang in the environment of \$PYTHON, default: .venv/bin/python), by the same
CMakeLists.txt: the tests of runs/arm_test.sh for Linux, which then run under qemu-user, and otaro-run for macOS on ARM,
which cannot run here: it must link, and be what it should be. --few: a tenth of the tests. Where zig or qemu is not there it
says so and exits with 0.
END
}

case "${1-}" in
    "" | --few) ;;
    -h | --help) usage; exit 0 ;;
    *) usage >&2; exit 2 ;;
esac
cd "$root"
export PYTHON=${PYTHON:-.venv/bin/python}
zig=$("$PYTHON" -c 'import pathlib, ziglang; print(pathlib.Path(ziglang.__file__).with_name("zig"))' 2>/dev/null) ||
    { echo "skipped: no ziglang in the environment of $PYTHON, so nothing is compiled by clang for ARM" >&2; exit 0; }
mkdir -p build/clang

# compiler NAME TARGET: a C++ compiler for it. zig takes what other clangs call -march by another name.
compiler() {
    cat >"build/clang/$1" <<END
#!/usr/bin/env bash
exec "$zig" c++ -target $2 "\${@/#-march=armv8*-a/-mcpu=generic}"
END
    chmod +x "build/clang/$1"
}
compiler linux aarch64-linux-musl
compiler macos aarch64-macos

CROSS_CXX=$root/build/clang/linux BUILD=build/clang/arm runs/arm_test.sh "$@"

echo "compiling otaro-run for macOS"
cmake -S . -B build/clang/native -DOTARO_NATIVE=ON -DCMAKE_SYSTEM_NAME=Darwin -DCMAKE_SYSTEM_PROCESSOR=arm64 \
    -DCMAKE_CXX_COMPILER="$root/build/clang/macos" -DCMAKE_OSX_SYSROOT= -DCMAKE_CXX_ARCHIVE_FINISH= \
    -DCMAKE_CXX_ARCHIVE_CREATE="$zig ar qcs <TARGET> <OBJECTS>" >/dev/null
cmake --build build/clang/native --parallel 2 >/dev/null
"$PYTHON" - build/clang/native/otaro-run <<'END'
import sys
from pathlib import Path

data = Path(sys.argv[1]).read_bytes()
magic, processor = (int.from_bytes(data[at : at + 4], "little") for at in (0, 4))
if (magic, processor) != (0xFEEDFACF, 0x0100000C):
    sys.exit(f"error: {sys.argv[1]} is not a Mach-O program for ARM: {magic:#x}, {processor:#x}")
print(f"{sys.argv[1]}: Mach-O for ARM, {len(data) // 1000} kB; it was not run")
END
