# make demo: the main job on real input, on a CPU. make test: every fast check. Both build .venv themselves.
.PHONY: demo test test-slow lint format help
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

help:
	@echo "make demo       data set → statistics → train a small π0.5 → closed-loop evaluation (CPU, minutes)"
	@echo "make test       lint, types and the fast tests"
	@echo "make test-slow  the slow tests (kill and resume, long curves)"
	@echo "make format     apply ruff's formatting and fixes"

$(STAMP): requirements.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $(STAMP)

demo: $(STAMP)
	$(BIN)/python scripts/demo.py

test: $(STAMP) lint
	$(BIN)/pytest -m "not slow"

test-slow: $(STAMP)
	$(BIN)/pytest -m slow

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
