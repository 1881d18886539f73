# `make` alone prints what there is. Everything runs in .venv, which `make setup` builds from constraints.txt.
PYTHON ?= python3
UV_VERSION := 0.13.8
# two processes: each needs some ten seconds to import torch, so more of them seldom pays
PYTEST_ARGS ?= -n 2 --dist worksteal
# what `make lock` passes on, e.g.  make lock LOCK_ARGS="--upgrade-package ruff"
LOCK_ARGS ?=

BIN := .venv/bin
STAMP := .venv/.stamp
UV_PIP := $(BIN)/uv pip install --quiet --python $(BIN)/python
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test lint format bench lock clean

help:  ## show this help
	@echo "usage: make TARGET    (another Python: make setup PYTHON=python3.12)"; echo
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP)  ## create .venv and install lfc with its development tools
	@:

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "make: no '$(PYTHON)' here; install Python 3.10 to 3.13, or name one: make setup PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || { echo "make: lfc needs Python 3.10 to 3.13 and '$(PYTHON)' is $$($(PYTHON) -V 2>&1); name another: make setup PYTHON=python3.11" >&2; exit 1; }
	@[ -x $(BIN)/pip ] || { echo "Creating .venv with $$($(PYTHON) -V)"; $(PYTHON) -m venv --clear .venv || { echo "make: could not create .venv; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }; }
	@echo "Installing lfc and what it needs (torch is large: some minutes on a slow line)"
	@$(PIP) uv==$(UV_VERSION) && $(UV_PIP) -c constraints.txt -e '.[dev]' || { echo "uv did not manage; once more with pip, which is slower"; $(PIP) -c constraints.txt -e '.[dev]'; }
	@touch $@
	@echo "Ready: $(BIN)/lfc --help"

demo: setup  ## train on a simulated crowd and compare with majority vote
	@$(BIN)/python examples/demo.py

test: setup  ## run the tests and doctests (PYTEST_ARGS="-k name", PYTEST_ARGS="-m slow")
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: setup  ## check style, format and types
	@status=0; \
	$(BIN)/ruff check . || status=1; \
	$(BIN)/ruff format --check . || status=1; \
	$(BIN)/mypy || status=1; \
	exit $$status

format: setup  ## repair what ruff can repair
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: setup  ## measure the heads' speed, beside crowd-kit's
	@$(UV_PIP) -c constraints.txt -e '.[benchmarks]' || $(PIP) -c constraints.txt -e '.[benchmarks]'
	@$(BIN)/python benchmarks/heads.py

lock: setup  ## write constraints.txt again after a change of dependencies (LOCK_ARGS=--upgrade)
	@$(BIN)/uv pip compile --quiet pyproject.toml --all-extras --universal --python-version 3.10 --no-annotate \
		--custom-compile-command "make lock" $(LOCK_ARGS) -o constraints.txt

clean:  ## remove .venv, caches and builds; runs/ stays
	@rm -rf .venv .pytest_cache .ruff_cache .mypy_cache dist build *.egg-info
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
