#!/usr/bin/env bash
# usage: benchmarks/count_arm.sh [GGML] [TOKENS...]
#
# Instructions that a CPU for ARM executes per weight and token, one token or several times a matrix: ours at every
# precision, and ggml's beside them. Counted by qemu-user, an instruction at a time, as the difference between twice and
# once. GGML is a checkout of github.com/ggml-org/ggml, whose NEON kernels for Q4_0 and Q8_0 are compiled with the same
# compiler and the same instructions; without it, or where it is "", only ours are counted. TOKENS are 1, 8 and 64 unless
# told; 64 take minutes. Needs cmake, Debian's g++-aarch64-linux-gnu and qemu-user-static.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../runs/shared.sh"

case "${1-}" in -h | --help) usage; exit 0 ;; esac
ggml=${1:+$(cd "$1" && pwd)}
shift $(($# > 0))
[ $# -gt 0 ] || set -- 1 8 64
cd "$root"
build=build/arm/count weights=$((16 * 4096))
PATH=$PATH:$root/.venv/bin
cmake -S . -B $build -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
    -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DCMAKE_EXE_LINKER_FLAGS=-static -DOTARO_NATIVE=ON >/dev/null
cmake --build $build --target count_arm --parallel 2 >/dev/null

executed() { qemu-aarch64-static -cpu max -singlestep -d exec,nochain -D /dev/stderr "$@" 2>&1 >/dev/null | wc -l; }
# per_weight PROGRAM NAME WHAT TOKENS
per_weight() {
    local once twice
    once=$(executed "$@" 1) twice=$(executed "$@" 2)
    awk "BEGIN { printf \"%.3f\", ($twice - $once) / ($weights * $4) }"
}

aarch64-linux-gnu-g++ --version | head -1
[ -z "$ggml" ] || echo "ggml $(git -C "$ggml" rev-parse --short HEAD 2>/dev/null || echo "at an unknown commit")"
echo
printf '%-12s%8s' instructions tokens
printf '%8s' E5M3 E5M4 E5M5 E5M6 E5M7 E5M8 ${ggml:+Q4_0 Q8_0}
echo
for row in neon:armv8-a dotprod:armv8.2-a+dotprod+fp16 i8mm:armv8.2-a+dotprod+i8mm+fp16; do
    name=${row%%:*} march=${row#*:}
    if [ -n "$ggml" ]; then
        cpu=$ggml/src/ggml-cpu
        aarch64-linux-gnu-gcc -O3 -march="$march" -ffunction-sections -I"$cpu" -I"$ggml/src" -I"$ggml/include" \
            -c "$cpu/arch/arm/quants.c" -o $build/ggml.o
        # Of that file only the two functions are wanted, which call nothing.
        aarch64-linux-gnu-g++ -std=c++17 -O2 -DGGML -DOTARO_ARM -Isrc/otaro/kernels/shared -Isrc/otaro/kernels/csrc -static \
            -Wl,--gc-sections -Wl,--unresolved-symbols=ignore-all benchmarks/count_arm.cpp $build/ggml.o $build/libotaro.a \
            -o $build/count_ggml
    fi
    for tokens; do
        printf '%-12s%8s' "$name" "$tokens"
        for bits in 3 4 5 6 7 8; do printf '%8s' "$(per_weight $build/count_arm "$name" $bits "$tokens")"; done
        # A row and a token at a time: the same for any number of them.
        [ -z "$ggml" ] || for type in q4_0 q8_0; do printf '%8s' "$(per_weight $build/count_ggml ggml $type 1)"; done
        echo
    done
done
