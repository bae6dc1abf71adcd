PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUNS := $(VENV)/.runs
READY := $(VENV)/.ready
CXX_FILES := $(wildcard src/otaro/kernels/csrc/*.cpp src/otaro/kernels/csrc/*.h src/otaro/kernels/shared/*.h \
	src/otaro/kernels/cuda_src/*.cu* native/*.cpp native/*.h src/otaro/web/wasm/*.cpp \
	tests/kernels/*.h tests/kernels/*.cpp)

.PHONY: help setup demo native native-aarch64 test slow check stubs sanitize portability arm-test vllm-test \
	web-test web-demo format clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

setup: $(READY) ## make .venv with everything the project needs, developer tools included

$(RUNS): pyproject.toml constraints.txt CMakeLists.txt \
		$(wildcard src/otaro/kernels/csrc/* src/otaro/kernels/shared/*)
	@$(PYTHON) -c 'import sys; sys.exit("otaro needs Python 3.11 or newer, $(PYTHON) is %d.%d; set PYTHON=..." \
		% sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing torch, then the project with its C++ extension (two minutes the first time)"
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[report]'
	@touch $@

# otaro-llm is there already: pip adds what its extras ask for.
$(READY): $(RUNS)
	@echo "installing the developer's tools"
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt 'otaro-llm[dev]'
	@touch $@

demo: $(RUNS) ## tune the built-in model as usual and for all precisions, show what one file does; two minutes
	@$(BIN)/otaro demo

# It builds as if no make had called it: else it tells of directories.
native: ## build otaro-run and the library of native/otaro.h, without Python, in build/native
	@cmake -S . -B build/native -DOTARO_NATIVE=ON >/dev/null
	@env -u MAKELEVEL -u MAKEFLAGS cmake --build build/native --parallel
	@ls -l build/native/otaro-run build/native/libotaro.a | awk '{ print $$NF ": " int($$5 / 1000) " kB" }'

native-aarch64: ## the same for aarch64, by a cross-compiler, and run once under qemu-user
	@runs/native_aarch64.sh

PYTEST = $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

test: setup ## run the tests, but for the slow ones
	@$(PYTEST) -m 'not slow and not web'

slow: setup ## run the slow tests: the documents' commands one after the other, tuning end to end, the study
	@$(PYTEST) -m slow

check: setup ## lint, formatting, types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)
	@$(BIN)/mypy

stubs: setup ## say anew what the C++ extension offers (src/otaro/kernels/_cpu.pyi)
	@$(BIN)/python -m runs.stubs

sanitize: setup ## test the kernels under AddressSanitizer and UBSan
	@.ci/sanitize $(BIN)/python

portability: setup ## the numerical tests again, as other CPUs and numbers of threads would compute them
	@.ci/portability $(BIN)/python

arm-test: setup ## the kernels for ARM, cross-compiled, on three CPUs that qemu emulates
	@PYTHON=$(BIN)/python runs/arm_test.sh

vllm-test: setup ## vLLM for CPUs in .venv-vllm, with our plug-in, beside our own runtime; MODEL= for another
	@MODEL='$(MODEL)' PYTHON='$(PYTHON)' runs/vllm_test.sh

# zig is a hundred megabytes, so not among the developer's tools.
ZIG = $(BIN)/python -m pip install --quiet --constraint constraints.txt ziglang

web-test: setup ## test otaro web's page in a browser, with zig, npm and chromium; two minutes, at first four
	@$(ZIG) || echo "zig could not be installed: the tests that need it will be skipped"
	@$(BIN)/python -m pytest -m web tests/web

web-demo: $(RUNS) ## the built-in model in your browser, plane by plane, from this machine
	@$(ZIG)
	@rm -rf demo/web demo/web-model
	@$(BIN)/otaro pack builtin demo/web-model
	@$(BIN)/otaro web demo/web-model demo/web --name 'the built-in model'
	@$(BIN)/python -m otaro.web.server demo/web

format: setup ## rewrite files in the project's format
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .
	@$(BIN)/clang-format -i $(CXX_FILES)

clean: ## remove what make made
	rm -rf $(VENV) .venv-vllm demo build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
