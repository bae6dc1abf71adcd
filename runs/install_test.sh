#!/usr/bin/env bash
# Installs the committed state of this repository into empty environments as users do, and runs it there:
#
#     runs/install_test.sh [WORK]     # about ten minutes on two cores; WORK is kept, and 5 GB large
#
# from git with a compiler, from git without one, and from the wheel where there is none. Each line at the end
# says which kernels serve; it fails where they are not those that the way of installing should give.
set -euo pipefail
repository=$(cd "$(dirname "$0")/.." && git rev-parse --show-toplevel)
work=$(realpath "${1:-$(mktemp -d)}")
python=${PYTHON:-python3}
mkdir -p "$work/tools" "$work/wheels"

# What a machine without a compiler has: git, and what every system has. No cc, c++, cmake, ninja, make.
for tool in git bash sh env cat ls uname sed grep mkdir rm cp mv dirname basename realpath nice ldd; do
  if found=$(command -v "$tool"); then ln -sf "$found" "$work/tools/$tool"; fi
done

# try NAME PATH WHAT EXPECTED: WHAT into an empty environment with PATH; EXPECTED begins the kernels' name.
try() {
  local name=$1 path=$2 what=$3 expected=$4 environment=$work/$1
  rm -rf "$environment"
  "$python" -m venv "$environment"
  # torch first, as `make setup` has it: what others ask for may be a build with gigabytes of CUDA libraries.
  "$environment/bin/pip" install --quiet --constraint "$repository/constraints.txt" torch
  env PATH="$environment/bin:$path" "$environment/bin/pip" install --quiet \
    --constraint "$repository/constraints.txt" "$what"
  cd "$work" # away from the repository, whose src would be imported
  env PATH="$environment/bin:$path" "$environment/bin/otaro" pack builtin "$work/$name-tiny" --overwrite \
    >/dev/null
  env PATH="$environment/bin:$path" "$environment/bin/otaro" generate "$work/$name-tiny" \
    --prompt "The statement" --precision E5M4 --max-new-tokens 8 >"$work/$name.txt" 2>"$work/$name.err"
  local kernels
  kernels=$(env PATH="$environment/bin:$path" "$environment/bin/python" -c \
    'import otaro; from otaro.kernels import ops; print(otaro.__version__, *ops.backend("cpu"), sep=" | ")')
  echo "$name | $kernels"
  case $kernels in *" | $expected"*) ;; *) echo "$name: expected kernels $expected" >&2; exit 1 ;; esac
  grep -q "^The statement" "$work/$name.txt"
}

"$python" -m pip wheel --quiet --no-deps --wheel-dir "$work/wheels" "git+file://$repository"
wheel=$(ls -t "$work"/wheels/otaro_llm-*.whl | head -1)
try with-a-compiler "$PATH" "git+file://$repository" cpu:
try without-a-compiler "$work/tools" "git+file://$repository" reference
try wheel-without-a-compiler "$work/tools" "$wheel" cpu:
cmp "$work/with-a-compiler.txt" "$work/without-a-compiler.txt" # slowly, and the same words
echo "all three work; the wheel is $wheel"
