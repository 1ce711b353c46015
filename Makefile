# `make demo` and `make test` need Python >= 3.11, a C++ compiler and pip, and nothing before them.
#
#   PYTHON=python3.12     which Python the environment is made with (found by itself otherwise)
#   VENV=.venv            where the environment is
#   EXTRAS=...            extras of pyproject.toml to install; add cuda12 or cuda13 on a GPU machine
#   CUDA_KERNELS=all      build the CUDA kernels too, where nvcc is found (minutes; ci: a few of them)
#   ARGS="--steps 20"     flags for the demo, for pytest, or for the program of a target
#   CUDA=13               build a wheel with all CUDA kernels, for jax[cuda13]; 12 likewise
#   NVCC=/path/to/nvcc    compile it with this nvcc (for 13 the default is that of PyPI)
#   FUZZ_SECONDS=600      how long to fuzz

PYTHON ?=
VENV ?= .venv
EXTRAS ?= flax,data,plot,test,dev
CUDA_KERNELS ?= off
CUDA ?=
NVCC ?=
ARGS ?=
FUZZ_SECONDS ?= 600
JOBS ?= 2

BIN := $(VENV)/bin
PYTHON_SOURCES := magi_jax tests examples tools benchmarks
CPP_SOURCES = $(shell find xla_ffi tests -name '*.cc' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

.PHONY: help setup demo test fuzz stress sanitize lint format examples docs build check-wheel clean

help:  ## Shows this list
	@sed -n 's/^\([a-z-]*\):.*##\(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16
	@sed -n 's/^#   //p' $(MAKEFILE_LIST) | sed 's/^/  /'

setup:  ## Makes the environment and builds the package; does nothing when all is up to date
	@sh tools/setup.sh "$(VENV)" "$(EXTRAS)" "$(CUDA_KERNELS)" "$(PYTHON)"

demo: setup  ## Trains a small language model on 8 virtual devices (pictures in outputs/)
	@$(BIN)/python examples/train_lm.py $(ARGS)

test: setup  ## Runs all tests
	@$(BIN)/python -m pytest tests -n $(JOBS) $(ARGS)

fuzz: setup  ## Compares everything with the oracle on hostile masks and values, for FUZZ_SECONDS
	@$(BIN)/python tests/fuzz/fuzz.py --seconds $(FUZZ_SECONDS) $(ARGS)

stress: setup  ## Trains through 5,000 packings, and through processes that die, freeze and differ
	@$(BIN)/python tests/stress/endurance.py $(ARGS)
	@$(BIN)/python -m pytest tests/stress/long_faults.py -v

sanitize: setup  ## Builds with the address and undefined-behaviour sanitizers, tests and fuzzes that
	@$(BIN)/python tests/sanitize/sanitize.py --jobs $(JOBS) $(ARGS)

lint: setup  ## Checks formatting, style and types
	@$(BIN)/ruff check $(PYTHON_SOURCES)
	@$(BIN)/ruff format --check $(PYTHON_SOURCES)
	@$(BIN)/mypy magi_jax
	@$(BIN)/clang-format --dry-run --Werror $(CPP_SOURCES)

format: setup  ## Formats all sources
	@$(BIN)/ruff check --fix $(PYTHON_SOURCES)
	@$(BIN)/ruff format $(PYTHON_SOURCES)
	@$(BIN)/clang-format -i $(CPP_SOURCES)

examples: EXTRAS := $(EXTRAS),examples
examples: setup  ## Runs all examples with small sizes (some minutes)
	@$(BIN)/python tools/run_examples.py $(ARGS)

docs: EXTRAS := $(EXTRAS),docs
docs: setup  ## Builds the documentation site into site/; fails on every warning
	@$(BIN)/mkdocs build --quiet

build: setup  ## Builds a wheel into dist/, for CPU or with CUDA=12 or 13
	@$(BIN)/python tools/build_wheel.py $(if $(CUDA),--cuda $(CUDA)) $(if $(NVCC),--nvcc $(NVCC))

check-wheel: build  ## Installs the wheel into an empty environment and runs attention there
	@$(BIN)/python tools/check_wheel.py

bench-report: setup  ## Writes docs/results.md from the stored results
	@$(BIN)/python benchmarks/report.py

clean:  ## Removes the environment, builds and caches
	rm -rf "$(VENV)" build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
