#!/usr/bin/env bash
# usage: runs/study_in_parts.sh PARTS WORK MINUTES
#
# The study on a machine without a network that takes its files in parts (runs/study/parts.py cuts them) and
# commands of limited length. Call it again after each part: when all have come, it joins them and starts
# fourteen workers, once. They go on when the call has ended, and begin no row that would end later than in
# MINUTES. Rows are in WORK/study.jsonl. The code is copied to WORK, so that the checkout may be replaced
# meanwhile.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/shared.sh"
[ $# -eq 3 ] || { usage >&2; exit 2; }
parts=$1 minutes=$3 python=${PYTHON:-python3}
mkdir -p "$2"
work=$(cd "$2" && pwd)
if [ ! -d "$work/code" ]; then
    come=("$parts"/*-of-*)
    [ -e "${come[0]}" ] || die "$parts: no parts here; python -m runs.study.parts cut makes them"
    echo "${#come[@]} of ${come[0]##*-of-} parts have come"
    [ ${#come[@]} = "${come[0]##*-of-}" ] || exit 0
    PYTHONPATH=$root/src:$root "$python" -m runs.study.parts join "$parts" "$work"
    mkdir "$work/code"
    # Byte code is left out: whoever runs this checkout at the same time makes and removes it.
    (cd "$root" && find src runs -name __pycache__ -prune -o -type f -exec cp --parents -t "$work/code" {} +)
    cp "$root/benchmarks/results/study.jsonl" "$work/"
    commit=$(cd "$root" && git describe --always 2>/dev/null || echo "${COMMIT:-unknown}")
    # MPS lets kernels of several processes run at once.
    ! command -v nvidia-cuda-mps-control >/dev/null || nvidia-cuda-mps-control -d || true
    OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=2 TORCHINDUCTOR_CACHE_DIR="$work/inductor" \
        PYTHONUNBUFFERED=1 setsid nohup "$work/code/runs/study.sh" \
        --models "$work/models" --data "$work/data" --results "$work/study.jsonl" \
        --commit "$commit" --workers 14 --minutes "$minutes" >"$work/log" 2>&1 &
    study=$!
    for _ in {1..20}; do # what is missing is told before any worker starts
        sleep 1
        kill -0 $study 2>/dev/null && continue
        wait $study && break
        tail -n 20 "$work/log" >&2
        rm -r "$work/code"
        die "the study ended at once, as it says above"
    done
fi
wc -l "$work/study.jsonl"
