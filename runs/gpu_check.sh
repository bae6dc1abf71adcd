#!/usr/bin/env bash
# usage: runs/gpu_check.sh [LOG]
#
# On a machine with an NVIDIA GPU: run all test files with cuda, gpu, steps or fused in their names, and the
# tests with "small" in their names under compute-sanitizer: memcheck, racecheck and synccheck. $JOBS of them
# (default: 6, of at most 1 GB of GPU memory each) run side by side; what they printed goes to the screen and
# to LOG (default: gpu_check.log) when all have ended. The package need not be installed; $PYTHON is the
# interpreter (default: that of .venv, else python3), and $OTARO_COMMIT names the code where git cannot. Exits
# with 1 if anything failed.
set -uo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/shared.sh"
one_at_most "$@"

log=${1:-gpu_check.log}
case $log in /*) ;; *) log=$PWD/$log ;; esac
python=${PYTHON:-$root/.venv/bin/python}
[ -x "$python" ] || python=${PYTHON:-python3}
jobs=${JOBS:-6} limit=1200 # seconds
[[ $jobs =~ ^[1-9][0-9]*$ ]] || { echo "error: JOBS=$jobs is not a number of one or more" >&2; exit 2; }
export PYTHONPATH=$root/src${PYTHONPATH:+:$PYTHONPATH}
cd "$root" || exit 1

"$python" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null || {
    echo "error: $python finds no torch with an NVIDIA GPU here; nothing was checked" >&2
    exit 1
}
: >"$log" || exit 2 # before minutes are spent

mapfile -t files < <(find tests -name 'test_*cuda*.py' -o -name 'test_*gpu*.py' -o -name 'test_*steps*.py' \
    -o -name test_fused.py | sort)
tests=(-q -p no:cacheprovider --durations=3 -ra)
names=()
without_cudnn="import sys, pytest, torch; torch.backends.cuda.enable_cudnn_sdp(False); "
without_cudnn+="sys.exit(pytest.main(sys.argv[1:]))"

# Most of a step's time goes into compiling and into Python, so steps run side by side; their output is shown
# in order.
step() { # name, command...
    local name=$1 started number
    shift
    while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do wait -n; done
    names+=("$name") number=${#names[@]} started=$SECONDS
    {
        echo
        echo "== $name: $*"
        timeout "$limit" "$@"
        echo $? >"$scratch/$number.status"
        echo "== $name took $((SECONDS - started)) s"
    } >"$scratch/$number.log" 2>&1 &
}

sanitize() { # tool, test file
    # memcheck sees the edges of single tensors only if torch does not cut them out of larger pieces; graphs
    # need those pieces. racecheck finds hazards in cuDNN's own attention, so torch takes another of its
    # kernels there.
    local which=small settings=() pytest=(-m pytest)
    case $1 in
        memcheck) which="small and not graph" settings=(PYTORCH_NO_CUDA_MEMORY_CACHING=1) ;;
        racecheck) pytest=(-c "$without_cudnn") ;;
    esac
    step "$1 of $2" env "${settings[@]}" compute-sanitizer --tool "$1" --error-exitcode 9 \
        "$python" "${pytest[@]}" "${tests[@]}" -k "$which" "$2"
}

check() {
    scratch=$(mktemp -d)
    trap 'kill $(jobs -p) 2>/dev/null; rm -rf "$scratch"' EXIT
    trap 'tail -n 5 "$scratch"/*.log; echo "stopped; this is how far each came"; exit 130' INT TERM
    date -u '+%Y-%m-%d %H:%M UTC'
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
    "$python" - <<END
import platform, torch, transformers
from importlib.util import find_spec
versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
print(f"Python {platform.python_version()}, {versions}")
if find_spec("triton"):
    import triton
    print(f"Triton {triton.__version__}")
from otaro.kernels import ops
print("kernels: {} ({})".format(*ops.backend("cuda")))
END
    echo "commit ${OTARO_COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || echo unknown)}"
    local failed=() tools=(memcheck racecheck synccheck)
    if command -v compute-sanitizer >/dev/null; then
        compute-sanitizer --version | tail -n 1
    else
        echo "compute-sanitizer is not on the PATH: nothing runs under it"
        failed=("${tools[@]}") tools=()
    fi
    for file in "${files[@]}"; do
        step "$file" "$python" -m pytest "${tests[@]}" "$file"
    done
    for tool in "${tools[@]}"; do
        for file in "${files[@]}"; do
            ! grep -q "def test_.*small" "$file" || sanitize "$tool" "$file"
        done
    done
    wait
    for i in "${!names[@]}"; do
        cat "$scratch/$((i + 1)).log"
        case "$(cat "$scratch/$((i + 1)).status") ${names[i]}" in
            "0 "*) ;;
            "5 "*" of "*) ;; # the file has no test for the tool
            *) failed+=("${names[i]}") ;;
        esac
    done
    echo
    if [ ${#failed[@]} -gt 0 ]; then
        echo "FAILED: ${failed[*]}"
        return 1
    fi
    echo "all passed"
}

check 2>&1 | tee "$log"
