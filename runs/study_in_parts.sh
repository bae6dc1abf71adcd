#!/usr/bin/env bash
# The study on a machine that takes its files in parts (runs/study/parts.py) and commands of limited length.
#
#   runs/study_in_parts.sh PARTS WORK MINUTES
#
# Call it again after each part: it joins what is there, and starts the workers whose models have come. They go on when the
# call has ended, until MINUTES after the first call; rows are in WORK/study.jsonl. The code is copied to WORK first, so that
# the checkout may be replaced meanwhile. MPS lets kernels of several processes run at once.
set -euo pipefail
[ $# -eq 3 ] || { sed -n '2,8p' "$0" >&2; exit 2; }
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
[ -d "$1" ] || { echo "$1: no such folder; python -m runs.study.parts cut makes it" >&2; exit 1; }
parts=$(cd "$1" && pwd) work=$2 python=${PYTHON:-python3}
if [ ! -d "$work/code" ]; then
    mkdir -p "$work/code" "$work/claims"
    cp -r "$root/src" "$root/runs" "$work/code/"
    cp "$root/benchmarks/results/study.jsonl" "$work/"
    (cd "$root" && git describe --always 2>/dev/null || echo "${COMMIT:-unknown}") >"$work/commit"
    echo $(($(date +%s) + 60 * $3)) >"$work/deadline"
    ! command -v nvidia-cuda-mps-control >/dev/null || nvidia-cuda-mps-control -d || true
fi
export HF_HUB_OFFLINE=1 PYTHONPATH="$work/code/src:$work/code" PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
export OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=2 TORCHINDUCTOR_CACHE_DIR="$work/inductor"
cd "$work/code"
"$python" -m runs.study.parts join "$parts" --models "$work/models" --data "$work/data"

start() { # a file that says they run, the numbers of the workers (0 and 2 of five prefer small models), patterns
    local once=$1 numbers=$2
    shift 2
    [ ! -e "$once" ] || return 0
    touch "$once"
    for number in $numbers; do
        setsid nohup "$python" -m runs.study --models "$work/models" --data "$work/data" --results "$work/study.jsonl" \
            --commit "$(cat "$work/commit")" --claims "$work/claims" --worker "$number" --deadline "$(cat "$work/deadline")" \
            --only "$@" >"$work/log.$number" 2>&1 &
    done
}
[ ! -f "$work/models/stories15M/model.safetensors" ] || start "$work/small" "0 2 5 7 10 12" 'stories15M*' 'MoE*' 'demo*'
[ ! -f "$work/models/SmolLM2-135M/model.safetensors" ] || start "$work/large" "1 3 4 6 8 9 11 13" '*'
wc -l "$work/study.jsonl"
