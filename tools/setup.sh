#!/usr/bin/env bash
# Installs what is missing: Debian packages, then the Python environment with the pinned torch wheel.
# Safe to run at any time and by several clones at once; with nothing missing it takes a moment and touches nothing.
#   VENV=...            use this environment instead of making one
#   RAGGED_TORCH=any    let VENV hold any torch that the C++ library supports, not just the pinned one
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

packages=(git make g++ cmake ninja-build ccache python3-venv python3-dev libfmt-dev nlohmann-json3-dev libcli11-dev
  libtomlplusplus-dev libxxhash-dev libgtest-dev libgmock-dev libbenchmark-dev)

say() { echo "setup: $*"; }
die() {
  printf 'setup: %s\n' "$@" >&2
  exit 1
}

# --- Debian packages ----------------------------------------------------------------------------------------------

install_packages() {
  local apt="apt-get install -y --no-install-recommends $*"
  local as_root=()
  if ((EUID != 0)); then
    if command -v sudo >/dev/null && { sudo -n true 2>/dev/null || [[ -t 0 ]]; }; then
      as_root=(sudo)
    else
      die "Missing packages: $*" "They need root, and there is no usable sudo here. Have someone who may run:" \
        "  apt-get update && $apt" "then run this again."
    fi
  fi
  say "installing missing packages: $*"
  say "running: ${as_root[0]:+sudo }apt-get update && ${as_root[0]:+sudo }$apt"
  # Another apt, such as unattended upgrades on a new machine, is waited for.
  local run=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=600)
  "${run[@]}" update || say "apt-get update had errors; trying with the lists that are there"
  "${run[@]}" install -y --no-install-recommends "$@" ||
    die "apt-get failed, see above. Once it works by hand, run this again:" "  $apt"
}

missing=()
if command -v dpkg-query >/dev/null; then
  installed=$(dpkg-query --show --showformat='${db:Status-Status} ${Package}\n' "${packages[@]}" 2>/dev/null || true)
  for package in "${packages[@]}"; do
    grep -qx "installed $package" <<<"$installed" || missing+=("$package")
  done
  if ((${#missing[@]})); then
    install_packages "${missing[@]}"
  fi
else
  say "not a Debian system: these must be there already, under whatever name: ${packages[*]}"
fi

cmake_version=$(cmake --version 2>/dev/null | sed -n 's/^cmake version //p')
if [[ $(printf '%s\n' 3.25 "${cmake_version:-0}" | sort -V | head -n 1) != 3.25 ]]; then
  die "Expected CMake 3.25 or newer, but got ${cmake_version:-none} ($(command -v cmake || echo 'not on PATH'))." \
    "Debian 12, Ubuntu 24.04 and later have it."
fi

# --- Python environment -------------------------------------------------------------------------------------------

pinned=$(sed -n 's/^torch==//p' tools/requirements.lock)

# Prints the version of torch in environment $1 without importing it (that takes seconds).
torch_version() {
  "$1/bin/python" - 2>/dev/null <<'PY'
import importlib.util, pathlib, re
folder = importlib.util.find_spec("torch").submodule_search_locations[0]
text = (pathlib.Path(folder) / "version.py").read_text()
print(re.search(r"__version__ = '([^']*)'", text)[1])
PY
}

check_own_environment() {
  local venv=$1 found
  [[ -x $venv/bin/python ]] || die "Expected VENV=$venv to be a Python environment, but it has no bin/python."
  found=$(torch_version "$venv") ||
    die "Expected torch $pinned in VENV=$venv, but it has no torch." "Install it: $venv/bin/pip install -r tools/requirements.lock"
  case ${RAGGED_TORCH:-pinned}:${found%%+*} in
    *:"$pinned" | any:2.1[1-5].*) ;;
    *)
      die "Expected torch $pinned in VENV=$venv, but it has $found." \
        "Install the pinned one ($venv/bin/pip install -r tools/requirements.lock)," \
        "or set RAGGED_TORCH=any to try with another from 2.11 to 2.15."
      ;;
  esac
}

is_complete() { [[ -f $1/.complete ]] && "$1/bin/python" -c '' 2>/dev/null; }

make_environment() {
  local venv=$1 python free_kb
  python=$(tools/venv_path.sh --python)
  mkdir -p -- "$(dirname -- "$venv")"
  exec 9>"$venv.lock"
  flock --nonblock 9 || {
    say "waiting for another setup that is making $venv"
    flock 9
  }
  if is_complete "$venv"; then # made while we waited
    return
  fi
  free_kb=$(df --output=avail -k -- "$(dirname -- "$venv")" | tail -n 1)
  ((free_kb > 9000000)) ||
    die "Expected 9 GB of free space for the environment, but $(dirname -- "$venv") has $((free_kb / 1000000)) GB." \
      "Choose another cache folder with XDG_CACHE_HOME, or an environment of your own with VENV."
  say "making the Python environment $venv with torch $pinned (some 3 GB to fetch, 6 GB on disk)"
  rm -rf -- "$venv" "$venv.tmp"
  mkdir -- "$venv.tmp" # pip unpacks gigabytes into TMPDIR, and /tmp may be in memory
  "$python" -m venv "$venv"
  # The lock file is complete, so nothing is resolved; pip check proves that it is.
  TMPDIR=$venv.tmp "$venv/bin/python" -m pip install --disable-pip-version-check --no-input --no-deps \
    --only-binary :all: --requirement tools/requirements.lock ||
    die "pip could not install tools/requirements.lock into $venv, see above. Run this again to start afresh."
  "$venv/bin/python" -m pip --disable-pip-version-check check
  rm -rf -- "$venv.tmp"
  cp tools/requirements.lock "$venv/.complete" # last: without it the folder counts as half made
}

venv=$(tools/venv_path.sh)
if [[ -n ${VENV:-} ]]; then
  check_own_environment "$venv"
elif ! is_complete "$venv"; then
  make_environment "$venv"
fi

# --- what the Hugging Face tests load ------------------------------------------------------------------------------

# Beside the environment, not in it: these packages ask for many more that the tests don't need. Without them the tests
# skip, so a machine that can't fetch them still sets up.
extras=$venv/huggingface
if [[ -z ${VENV:-} ]] && ! cmp -s tools/requirements-hf.lock "$extras/.complete"; then
  say "fetching the packages of the Hugging Face tests (some 120 MB)"
  rm -rf -- "$extras" "$extras.tmp"
  if "$venv/bin/python" -m pip install --disable-pip-version-check --no-input --no-deps --quiet \
    --only-binary :all: --target "$extras.tmp" --requirement tools/requirements-hf.lock; then
    cp tools/requirements-hf.lock "$extras.tmp/.complete"
    mv -T -- "$extras.tmp" "$extras"
  else
    say "pip could not install tools/requirements-hf.lock, see above; the tests that need it will skip"
  fi
fi
say "ready, Python environment $venv"
