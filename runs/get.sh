# Sourced by get_*.sh: $model comes to $out whole or not at all, by way of $work/model.
. "$(dirname "${BASH_SOURCE[0]}")/shared.sh"
one_at_most "$@"
out=${1:-$root/models/$model}
if [ -f "$out/model.safetensors" ]; then
    echo "already there: $out"
    exit 0
fi
[ ! -e "$out" ] || die "$out exists but holds no model.safetensors; move it away first"
python=$root/.venv/bin/python
[ -x "$python" ] || python=python3

# A sibling of OUT: the last step is then a rename within one file system, and OUT is never half-written.
mkdir -p "$(dirname "$out")"
work=$(mktemp -d "$(dirname "$out")/.get_$model.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

check() { # file, its sha256; not by sha256sum, which not every system has
    local sha256
    sha256=$("$python" -c '
import hashlib, sys
print(hashlib.file_digest(sys.stdin.buffer, "sha256").hexdigest())' <"$1")
    [ "$sha256" = "$2" ] || die "${1#"$work"/} has sha256 $sha256, expected $2"
}

finish() {
    chmod +r "$work/model/model.safetensors" # it was written for the owner only
    # os.rename, because mv would put the result inside OUT if another run had made it meanwhile.
    "$python" -c 'import os, sys; os.rename(sys.argv[1], sys.argv[2])' "$work/model" "$out"
    echo "wrote $out"
}
