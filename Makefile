# The commands of this repository; the work is done by CMake (CMakePresets.json) and the scripts in tools/.
#   VENV=DIR    a Python environment of your own with the pinned torch, instead of the one that setup makes
#   LABEL=unit  for test: only the tests with this label
#   JOBS=N      compilers at once
#   ROUNDS=7, REPEATS=3   for bench-peers: rounds in which systems take turns, and how often they start anew
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := build

# A compiler that reads torch's headers takes up to 1.7 GB, so little memory means fewer of them.
JOBS ?= $(shell awk -v cores=$$(nproc) '/MemAvailable/ { jobs = int($$2 / 1700000); \
  print jobs < 1 ? 1 : jobs < cores ? jobs : cores }' /proc/meminfo)
LABEL ?=
RANKS ?= 4
CONFIG ?= configs/demo.toml
ROUNDS ?= 7
REPEATS ?= 3
export VENV
export OMP_NUM_THREADS ?= 1

# $(call cmake_build,PRESET,FOLDER[,TARGET]): configure if the folder is new, the environment is another, or the
# presets changed; after that the generated build files notice changes by themselves.
define cmake_build
python=$$(tools/venv_path.sh)/bin/python; \
if [[ ! -f $(2)/build.ninja || CMakePresets.json -nt $(2)/build.ninja ]] || \
    ! grep -qs "^Python3_EXECUTABLE:[A-Z]*=$$python$$" $(2)/CMakeCache.txt; then \
  cmake --preset $(1) -DPython3_EXECUTABLE="$$python"; \
fi; \
cmake --build --preset $(1) --parallel $(JOBS) $(if $(3),--target $(3))
endef

.PHONY: help setup build test demo wheel bench bench-peers asan fuzz format lint clean

help: ## print this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

setup: ## install what is missing: Debian packages, Python environment
	@tools/setup.sh

build: setup ## compile everything into build/; the command is build/bin/ragged (default)
	@$(call cmake_build,dev,build)

test: build ## run every test, or those of one tier with LABEL=unit
	@ctest --preset dev $(if $(LABEL),--label-regex '^($(LABEL))$$')

demo: build ## train the demo model on 4 ranks of this machine
	"$$(tools/venv_path.sh)/bin/torchrun" --standalone --nproc-per-node $(RANKS) --no-python \
	  build/bin/ragged train $(CONFIG)

wheel: setup ## build the Python package into dist/, for the torch in the environment
	@CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) "$$(tools/venv_path.sh)/bin/python" -m pip --disable-pip-version-check wheel \
	  --no-build-isolation --no-deps --wheel-dir dist .

bench: setup ## build with -O3 into build-release/ and run the benchmarks
	@$(call cmake_build,release,build-release)
	@shopt -s nullglob; for bench in build-release/bin/*_bench; do echo "== $$bench"; "$$bench"; done

bench-peers: setup ## train beside FSDP2, DeepSpeed and others on a quiet machine, and rewrite docs/peers.md from it
	@tools/setup_peers.sh
	@$(call cmake_build,release,build-release,ragged_python ragged_peer)
	@export PYTHONPATH=build-release/python RAGGED_PEERS_BUILD='with -O3 (make bench-peers)'; \
	  python=$$(tools/venv_path.sh --peers)/bin/python; \
	  $$python -m bench.peers.dry_run; \
	  $$python -m bench.peers.run --rounds $(ROUNDS) --repeats $(REPEATS); \
	  $$python -m bench.peers.page

asan: setup ## run the C++ tests under the address and undefined-behaviour sanitizers
	@$(call cmake_build,asan,build-asan)
	@ctest --preset asan

fuzz: ## feed strangers' files to the readers of inventories, safetensors and checkpoints for a minute each (needs clang)
	@tools/fuzz

format: ## rewrite the C++ files in the house style
	@git ls-files '*.h' '*.cpp' | xargs clang-format -i

lint: setup ## check format, layers and spelling, and clang-tidy on what changed
	@$(call cmake_build,lint,build-lint,headers)
	@tools/lint

clean: ## remove the build folders; the Python environment stays
	rm -rf build build-release build-asan build-fuzz build-lint build-wheel dist
