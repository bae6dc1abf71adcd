#!/usr/bin/env bash
# usage: runs/study_in_parts.sh cut PARTS DATA             here: models and data as files in PARTS, each of $SIZE at most (52m)
#        runs/study_in_parts.sh run PARTS WORK MINUTES     there, when all have come
#
# The study on a machine without a network that takes its files in parts and commands of limited length. `run` starts
# fourteen workers once; they go on when the call has ended, and begin no row that would end later than in MINUTES. Rows are in
# WORK/study.jsonl; call it again to see how many. The code is copied to WORK, so that the checkout may be replaced meanwhile.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/shared.sh"
case "${1-}:$#" in cut:3 | run:4) ;; *) usage >&2; exit 2 ;; esac
parts=$2
if [ "$1" = cut ]; then
    data=$(cd "$3" && pwd)
    mkdir -p "$parts"
    rm -f "$parts"/part.*
    (cd "$root" && tar -cJf - --transform 's,^\./,data/,' models/stories15M models/SmolLM2-135M models/zeroshot-*.json.gz \
        -C "$data" ./wikitext-2/{valid,test}.txt ./alpaca/alpaca_5000.json) | split -b "${SIZE:-52m}" - "$parts/part."
    ls -l "$parts"
    exit 0
fi
ls "$parts"/part.* >/dev/null 2>&1 || die "$parts has no parts; runs/study_in_parts.sh cut makes them"
if [ ! -d "$3/code" ]; then
    mkdir -p "$3"
    work=$(cd "$3" && pwd)
    cat "$parts"/part.* | tar -xJf - -C "$work"
    mkdir "$work/code"
    cp -r "$root/src" "$root/runs" "$work/code/"
    cp "$root/benchmarks/results/study.jsonl" "$work/"
    commit=$(cd "$root" && git describe --always 2>/dev/null || echo "${COMMIT:-unknown}")
    # MPS lets kernels of several processes run at once.
    ! command -v nvidia-cuda-mps-control >/dev/null || nvidia-cuda-mps-control -d || true
    OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=2 TORCHINDUCTOR_CACHE_DIR="$work/inductor" PYTHONUNBUFFERED=1 \
        setsid nohup "$work/code/runs/study.sh" --models "$work/models" --data "$work/data" --results "$work/study.jsonl" \
        --commit "$commit" --workers 14 --minutes "$4" >"$work/log" 2>&1 &
fi
wc -l "$3/study.jsonl"
