# Sourced by other scripts: the comment at their head is what --help prints.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

usage() { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; }

die() { echo "error: $*" >&2; exit 1; }

one_at_most() { # the arguments of a script that takes one, and no options
    case "${1-}" in
        -h | --help) usage; exit 0 ;;
        -*) usage >&2; exit 2 ;;
    esac
    [ $# -le 1 ] || { usage >&2; exit 2; }
}
