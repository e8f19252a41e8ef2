#!/usr/bin/env bash
# Prints the folder of the Python environment that this checkout uses; with --python, the interpreter to make it from.
# With --peers, the folder of the one that bench/peers adds to it (tools/setup_peers.sh).
# VENV=... of one's own wins. Otherwise it's in the user's cache folder, named after the lock file and the Python
# version, so that a second clone finds it and a changed lock file gets another. Makes nothing: tools/setup.sh does.
set -euo pipefail

root=$(dirname -- "${BASH_SOURCE[0]}")
cache=${XDG_CACHE_HOME:-$HOME/.cache}/ragged_fsdp
if [[ ${1:-} == --peers ]]; then
  base=$("${BASH_SOURCE[0]}")
  hash=$({ echo "$base"; cat -- "$root/../bench/peers/requirements.lock"; } | sha256sum)
  echo "$cache/peers-${hash:0:12}"
  exit
fi
if [[ ${1:-} != --python && -n ${VENV:-} ]]; then
  realpath --no-symlinks -- "$VENV"
  exit
fi

# python3 may be one that can't make environments (no venv module) or that torch has no wheel for.
for candidate in python3 python3.14 python3.13 python3.12 python3.11 /usr/bin/python3; do
  version=$("$candidate" -c '
import sys, venv, ensurepip
assert (3, 11) <= sys.version_info[:2] <= (3, 14)
print("%d.%d" % sys.version_info[:2])' 2>/dev/null) && break
done
if [[ -z $version ]]; then
  echo "$0: Expected a Python from 3.11 to 3.14 that has the venv module, but found none on PATH." \
    "Run 'make setup', install python3-venv, or name an environment of your own with VENV=..." >&2
  exit 1
fi
if [[ ${1:-} == --python ]]; then
  command -v "$candidate"
  exit
fi

hash=$({ cat -- "$root/requirements.lock"; echo "python $version"; } | sha256sum)
echo "$cache/venv-${hash:0:12}"
