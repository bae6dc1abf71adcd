#!/usr/bin/env bash
# otaro-run for aarch64: cross-built, and run under qemu-user beside the program of this machine, at every
# precision.
#     runs/native_aarch64.sh [DIR]      # a nested directory with decoder.json; by default the built-in model
# $COMPILER is the cross-compiler. Its log: benchmarks/results/native-aarch64-qemu.txt.
set -euo pipefail
cd "$(dirname "$0")/.."
compiler=${COMPILER:-aarch64-linux-gnu-g++}
if ! command -v "$compiler" >/dev/null; then
  echo "skipped: there is no $compiler (Debian: g++-aarch64-linux-gnu)"
  exit 0
fi
make --no-print-directory native
cmake -S . -B build/native-aarch64 -DOTARO_NATIVE=ON -DCMAKE_SYSTEM_NAME=Linux \
  -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER="$compiler" >/dev/null
cmake --build build/native-aarch64 --parallel | grep -E 'warning|error' || true
program=build/native-aarch64/otaro-run
echo "$program: $(($(stat -c %s $program) / 1000)) kB, commit $(git rev-parse --short HEAD)," \
  "$("$compiler" --version | head -1)"
qemu=$(command -v qemu-aarch64-static qemu-aarch64 | head -1) || true
[[ -n $qemu ]] || { echo "not run: there is no qemu-user"; exit 0; }
"$qemu" --version | head -1
model=${1:-build/native-aarch64/tiny}
[[ -e $model/decoder.json ]] || .venv/bin/otaro pack builtin "$model" >/dev/null
failed=0
for precision in E5M8 E5M7 E5M6 E5M5 E5M4 E5M3; do
  asked=("$model" --prompt "The list methods make it easy" --tokens 32 --threads 1 --precision $precision)
  here=$(build/native/otaro-run "${asked[@]}" 2>/dev/null)
  there=$("$qemu" -L /usr/aarch64-linux-gnu $program "${asked[@]}" 2>/dev/null) || there="it failed"
  if [[ $here == "$there" ]]; then
    echo "$precision: the same text"
  else
    echo "$precision: $there"
    failed=1
  fi
done
exit $failed
