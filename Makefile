# `make demo` and `make test` are all that a fresh machine needs; `make help` lists the rest.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_BUILD_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

SOURCES := $(shell find include src python cmake -type f -not -name '*.pyc') CMakeLists.txt pyproject.toml constraints.txt
CPP := $(shell find include src python tests -name '*.hpp' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' -o -path '*/emulator/*.h')

DOCS := sphinx myst-parser furo latex2mathml

.PHONY: help demo test lint format sanitize bench docs gpu-test wheel clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/installed  ## install into .venv and show what ndsoftmax does on this machine
	$(BIN)/python -m ndsoftmax

test: $(VENV)/tested-with build/cpp-tests/CMakeCache.txt  ## install into .venv and run all tests
	$(BIN)/cmake --build build/cpp-tests
	$(BIN)/ctest --test-dir build/cpp-tests --output-on-failure --no-tests=error
	$(BIN)/python -m pytest -n 2 --dist worksteal

lint: $(VENV)/linted-with  ## formatting, style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CPP)
	$(BIN)/mypy

format: $(VENV)/linted-with  ## put everything into the house's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

# GCC checks the first and last byte of a vector: redzones must be wider than one, or it reaches across them
sanitize: $(VENV)/tested-with  ## the C++ tests with address, undefined behaviour and thread sanitizers
	for run in "address,undefined ." "thread threads"; do set -e -- $$run; build=build/sanitize-$$1; \
	  $(BIN)/cmake -S . -B $$build -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -DNDSOFTMAX_TESTS=ON \
	    -DNDSOFTMAX_CUDA=OFF -DNDSOFTMAX_SANITIZE=$$1; \
	  $(BIN)/cmake --build $$build; \
	  ASAN_OPTIONS=redzone=128:detect_stack_use_after_return=0 TSAN_OPTIONS=halt_on_error=1 $(BIN)/ctest --test-dir $$build -R $$2 --output-on-failure --no-tests=error; \
	done

bench: $(VENV)/benched-with  ## measure this machine against torch
	$(BIN)/python -m ndsoftmax bench --suite rows,few,strided,small --dtype float32,bfloat16,float16

docs: $(VENV)/documented-with  ## build the pages into build/docs, and run their code; warnings are errors
	$(BIN)/python docs/examples.py
	$(BIN)/python -m sphinx --fresh-env --write-all --fail-on-warning --keep-going --quiet docs build/docs

gpu-test:  ## on a GPU machine, with the torch that is there: build, test, sanitize, measure
	benchmarks/gpu_test.sh

wheel: $(VENV)/bin/python  ## build a wheel into dist
	$(BIN)/python -m pip wheel --no-deps --wheel-dir dist .

clean:  ## remove everything that make made
	rm -rf $(VENV) build dist

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# torch first and alone: the isolated build of ndsoftmax neither needs nor fetches it
$(VENV)/torch: constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install torch numpy
	touch $@

$(VENV)/installed: $(SOURCES) $(VENV)/torch
	@echo "building ndsoftmax: 5 to 7 minutes with nvcc on 2 cores, 1 without"
	$(BIN)/python -m pip install .
	touch $@

$(VENV)/tested-with: $(VENV)/installed
	$(BIN)/python -m pip install pytest pytest-xdist hypothesis expecttest cmake ninja rich matplotlib $(DOCS)
	touch $@

$(VENV)/benched-with: $(VENV)/installed
	$(BIN)/python -m pip install rich matplotlib
	touch $@

$(VENV)/documented-with: $(VENV)/installed
	$(BIN)/python -m pip install $(DOCS)
	touch $@

# mypy reads torch's own annotations
$(VENV)/linted-with: $(VENV)/torch
	$(BIN)/python -m pip install ruff mypy clang-format
	touch $@

build/cpp-tests/CMakeCache.txt: CMakeLists.txt tests/cpp/CMakeLists.txt | $(VENV)/tested-with
	$(BIN)/cmake -S . -B build/cpp-tests -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -DNDSOFTMAX_TESTS=ON -DNDSOFTMAX_CUDA=OFF
