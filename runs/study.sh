#!/usr/bin/env bash
# The study of docs/results.md: run it, list it, report it. runs/study.sh --help tells more; the code is in
# runs/study/.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
[ -x "$python" ] || python=python3
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 PYTHONPATH="$root/src:$root${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m runs.study "$@"
