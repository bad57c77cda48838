# make serve | test | check | bench | fmt
# PYTHON=... chooses the interpreter that makes .venv, PORT=... the port of `make serve`.

SHELL := /bin/bash
PORT ?= 8000
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null && { echo $$p; break; }; done)
CODE := engine router cluster deployments tests benchmarks
BIN := .venv/bin
READY := .venv/.installed

.PHONY: serve test check bench fmt lint types fast install

serve: $(READY)
	@exec $(BIN)/roulant serve --port $(PORT)

test: $(READY)
	$(BIN)/python -m pytest

# Types and tests keep one core busy each, so they run side by side.
check: $(READY)
	@$(MAKE) --no-print-directory -j2 lint types fast

lint: $(READY)
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/lint-imports

types: $(READY)
	$(BIN)/mypy $(CODE)

fast: $(READY)
	$(BIN)/python -m pytest -q -m "not e2e and not model and not slow"

bench: $(READY)
	$(BIN)/python -m benchmarks.offline

fmt: $(READY)
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

install: $(READY)

# A plain range for torch can bring a build with gigabytes of CUDA libraries; a machine without a GPU asks for the version
# that is locked before anything else does. A machine with one keeps the torch that suits its driver.
$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Roulant needs Python 3.11 or 3.12; found neither (make PYTHON=/path/to/python3.11)" >&2; exit 1; }
	@echo "installing into .venv; the first time this takes minutes"
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -qq 'pip>=25.1'
	@if command -v nvidia-smi >/dev/null 2>&1; then \
		grep -v '^torch==' constraints.txt > .venv/constraints.txt; \
	else \
		cp constraints.txt .venv/constraints.txt; \
		$(BIN)/python -m pip install -qq -c .venv/constraints.txt torch==2.13.0; \
	fi
	@$(BIN)/python -m pip install -qq -c .venv/constraints.txt -e '.[dev]'
	@touch $@
