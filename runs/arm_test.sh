#!/usr/bin/env bash
# usage: runs/arm_test.sh [--few]
#
# The kernels for ARM on CPUs that are emulated: compile them with tests/kernels/driver.cpp, have the
# reference write its cases (tests/kernels/cases.py), and run them under qemu-user on CPUs without SDOT
# (cortex-a72), with it (neoverse-n1) and with I8MM (max). Every backend that a CPU can run must give the
# reference's bits, and all CPUs the digest of floats and logits that driver.digest has; what a CPU cannot run
# must never be chosen and, forced upon it, stop with an illegal instruction. Then again with
# UndefinedBehaviorSanitizer, on the last of them. --few: a tenth of the cases, no sanitizer.
#
# Needs Debian's g++-aarch64-linux-gnu and qemu-user-static, or what $CROSS_CXX and $QEMU name, and cmake.
# Where one is not there it says so and exits with 0. $PYTHON has the package (default: .venv/bin/python).
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/shared.sh"

few=()
case "${1-}" in
    "") ;;
    --few) few=(--few) ;;
    -h | --help) usage; exit 0 ;;
    *) usage >&2; exit 2 ;;
esac
cd "$root"
build=${BUILD:-build/arm} python=${PYTHON:-.venv/bin/python}
cross=${CROSS_CXX:-aarch64-linux-gnu-g++} qemu=${QEMU:-qemu-aarch64-static}
PATH=$PATH:$root/.venv/bin
for tool in "$cross" "$qemu" cmake; do
    command -v "$tool" >/dev/null && continue
    echo "skipped: no $tool here, so the kernels for ARM are not tested" >&2
    exit 0
done

# built FOLDER OPTION...
built() {
    local folder=$build/$1
    shift
    cmake -S . -B "$folder" -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
        -DCMAKE_CXX_COMPILER="$cross" -DCMAKE_EXE_LINKER_FLAGS=-static -DOTARO_NATIVE=ON "$@" >/dev/null
    cmake --build "$folder" --target driver --parallel 2 >/dev/null
}

echo "compiling for ARM"
built plain
driver=$build/plain/driver cases=$build/cases.bin
"$python" -W ignore -m tests.kernels.cases $cases "${few[@]}"
digest=$(<tests/kernels/driver.digest)
# The CPU, what it can run, the best first, and what it lacks.
for row in 'cortex-a72:neon portable:dotprod i8mm' 'neoverse-n1:dotprod neon portable:i8mm' \
    'max:i8mm dotprod neon portable:'; do
    IFS=: read -r cpu can lacks <<<"$row"
    found=$("$qemu" -cpu "$cpu" $driver --list | xargs)
    [ "$found" = "$can" ] || die "on $cpu these would serve: $found; expected: $can"
    said=$("$qemu" -cpu "$cpu" $driver $cases)
    echo "$cpu: ${said%%$'\n'*}"
    [ "${said##*$'\n'}" = "$digest" ] || die "on $cpu: ${said##*$'\n'}, elsewhere: $digest"
    for name in $lacks; do
        status=0
        { (ulimit -c 0 && exec "$qemu" -cpu "$cpu" $driver $cases "$name"); } >/dev/null 2>&1 || status=$?
        [ $status = 132 ] || die "$name on $cpu ended with $status, not with an illegal instruction (132)"
        echo "$cpu: $name, forced upon it, stops with an illegal instruction"
    done
done
if [ ${#few[@]} = 0 ]; then
    echo "compiling with UndefinedBehaviorSanitizer"
    built sanitized -DCMAKE_BUILD_TYPE=Debug -DOTARO_SANITIZE=undefined
    "$qemu" -cpu max $build/sanitized/driver $cases
fi
echo "all passed: $digest"
