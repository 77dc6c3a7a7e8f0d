# One command a job. Each sets up what it needs in .venv, on a machine with Python 3.10+ and nothing else.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: compare test lint bench clean

compare: $(STAMP)  ## every rule on the bundled model pair
	$(BIN)/acceptlib compare

test: lint  ## linters, types and all tests
	$(BIN)/pytest -n 2 --dist worksteal

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP)  ## CPU benchmark beside transformers
	$(BIN)/pytest bench --benchmark-only --benchmark-columns=median,iqr,rounds --benchmark-sort=name --benchmark-max-time=0.3

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .[dev]
	touch $@

clean:
	rm -rf $(VENV) dist
