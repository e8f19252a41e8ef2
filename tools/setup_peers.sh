#!/usr/bin/env bash
# Installs the systems that bench/peers compares with (bench/peers/requirements.lock) into an environment of their own,
# which sees torch in the environment of `make setup` and leaves that as it is. With nothing missing it touches nothing.
# A package that can't be installed is said and left out: its rows in the comparison are errors then.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

say() { echo "setup_peers: $*"; }

lock=bench/peers/requirements.lock
base=$(tools/venv_path.sh)
peers=$(tools/venv_path.sh --peers)
if [[ -f $peers/.complete ]] && "$peers/bin/python" -c '' 2>/dev/null; then
  say "ready, Python environment $peers"
  exit
fi

mkdir -p -- "$(dirname -- "$peers")"
exec 9>"$peers.lock"
flock 9
say "making the Python environment $peers (some 60 MB)"
rm -rf -- "$peers"
"$base/bin/python" -m venv "$peers"
packages_of='import sysconfig; print(sysconfig.get_path("purelib"))'
"$base/bin/python" -c "$packages_of" >"$("$peers/bin/python" -c "$packages_of")/base.pth"

# DeepSpeed comes as source: nothing of it is compiled here (it builds one operator when first used), and what builds
# it is in the base environment.
install() {
  DS_BUILD_OPS=0 DS_ACCELERATOR=cpu "$peers/bin/python" -m pip install --disable-pip-version-check --no-input --quiet \
    --no-deps --no-build-isolation "$@"
}
if install --requirement "$lock"; then
  cp -- "$lock" "$peers/.complete"
else
  say "pip could not install all of $lock, see above; one by one:"
  grep -v '^#' "$lock" | while read -r package; do
    install "$package" || say "left out: $package"
  done
fi
say "ready, Python environment $peers"
