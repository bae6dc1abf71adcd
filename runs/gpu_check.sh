#!/usr/bin/env bash
# All GPU tests, then the small ones under compute-sanitizer; what was seen goes to one log.
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

usage() {
    cat <<END
usage: runs/gpu_check.sh [LOG]

On a machine with an NVIDIA GPU: run all test files with cuda, gpu, steps or fused in their names, then
the tests with "small" in their names under compute-sanitizer: memcheck, racecheck and synccheck. Everything that is printed
goes to LOG too (default: gpu_check.log). The package need not be installed; \$PYTHON is the interpreter (default: python3), and
\$OTARO_COMMIT names the code where git cannot. Exits with 1 if anything failed.
END
}

case "${1-}" in
    -h | --help) usage; exit 0 ;;
    -*) usage >&2; exit 2 ;;
esac
[ $# -le 1 ] || { usage >&2; exit 2; }

log=${1:-gpu_check.log}
case $log in /*) ;; *) log=$PWD/$log ;; esac
python=${PYTHON:-python3}
export PYTHONPATH=$root/src${PYTHONPATH:+:$PYTHONPATH}
cd "$root" || exit 1

"$python" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null || {
    echo "error: $python finds no torch with an NVIDIA GPU here; nothing was checked" >&2
    exit 1
}

mapfile -t files < <(find tests -name 'test_*cuda*.py' -o -name 'test_*gpu*.py' -o -name 'test_*steps*.py' -o -name test_fused.py | sort)
tests=(-q -p no:cacheprovider --durations=3 -ra)
failed=()

step() { # name, command...
    local name=$1 started=$SECONDS
    shift
    echo
    echo "== $name: $*"
    "$@" || failed+=("$name")
    echo "== $name took $((SECONDS - started)) s"
}

sanitize() { # tool
    local tool=$1
    command -v compute-sanitizer >/dev/null || { echo "== $tool: compute-sanitizer is not on the PATH"; failed+=("$tool"); return; }
    # memcheck sees the edges of single tensors only if torch does not cut them out of larger pieces; graphs need those pieces.
    local which=small settings=()
    [ "$tool" != memcheck ] || { which="small and not graph"; settings=(PYTORCH_NO_CUDA_MEMORY_CACHING=1); }
    step "$tool" env "${settings[@]}" timeout 1200 compute-sanitizer --tool "$tool" --error-exitcode 9 \
        "$python" -m pytest "${tests[@]}" -k "$which" "${files[@]}"
}

check() {
    date -u '+%Y-%m-%d %H:%M UTC'
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
    "$python" - <<END
import platform, torch, transformers
from importlib.util import find_spec
print(f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}")
if find_spec("triton"):
    import triton
    print(f"Triton {triton.__version__}")
from otaro.kernels import ops
print("kernels: {} ({})".format(*ops.backend("cuda")))
END
    echo "commit ${OTARO_COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || echo unknown)}"
    compute-sanitizer --version 2>/dev/null | tail -n 1
    step tests "$python" -m pytest "${tests[@]}" "${files[@]}"
    for tool in memcheck racecheck synccheck; do
        sanitize "$tool"
    done
    echo
    if [ ${#failed[@]} -gt 0 ]; then
        echo "FAILED: ${failed[*]}"
        return 1
    fi
    echo "all passed"
}

check 2>&1 | tee "$log"
