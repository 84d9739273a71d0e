# make demo: the main job on real input, on a CPU. make test: every fast check. Both build .venv themselves.
.PHONY: live verify-live demo test test-slow lint format help
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
LIVE_PYTHON ?= $(PYTHON)
LIVE := .venv-live
LIVE_STAMP := $(LIVE)/.installed

help:
	@echo "make demo       data set → statistics → train a small π0.5 → closed-loop evaluation (CPU, minutes)"
	@echo "make test       lint, types and the fast tests"
	@echo "make test-slow  the slow tests (kill and resume, long curves)"
	@echo "make live       the venv of openpi's JAX code (LIVE_PYTHON: a Python 3.11 or 3.12)"
	@echo "make verify-live  openpi's JAX code against Piston, live (CPU, minutes)"
	@echo "make format     apply ruff's formatting and fixes"

$(STAMP): requirements.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $(STAMP)

$(LIVE_STAMP): scripts/openpi_live/requirements.txt scripts/openpi_live/requirements-openpi.txt
	$(LIVE_PYTHON) -m venv $(LIVE)
	$(LIVE)/bin/pip install --quiet --disable-pip-version-check -r scripts/openpi_live/requirements.txt
	$(LIVE)/bin/pip install --quiet --disable-pip-version-check --no-deps -r scripts/openpi_live/requirements-openpi.txt
	@touch $(LIVE_STAMP)

live: $(LIVE_STAMP)

verify-live: $(STAMP) $(LIVE_STAMP)
	$(BIN)/piston verify live

demo: $(STAMP)
	$(BIN)/python scripts/demo.py

test: $(STAMP) lint
	$(BIN)/pytest -m "not slow" -n 2

test-slow: $(STAMP)
	$(BIN)/pytest -m slow

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
