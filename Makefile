# The two commands: `make quickstart` and `make test`. Each sets everything up first.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help quickstart test lint setup clean
.DEFAULT_GOAL := help

help:
	@echo "make quickstart   set up, then train the small model and show that it learned (two minutes)"
	@echo "make test         set up, then run the tests"
	@echo "make lint         ruff, mypy --strict on the pure packages, import contracts"

setup: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"Laminar needs Python 3.11 or newer, this is {v.major}.{v.minor}: make PYTHON=/path/to/python3.11 ...")'
	@echo "Setting up .venv (about two minutes the first time) ..."
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

quickstart: setup
	@$(BIN)/laminar train -c configs/quickstart.toml --move-old

test: setup
	$(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile -m "not process and not long"
	$(BIN)/python -m pytest -m "process and not long"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf .venv build *.egg-info
