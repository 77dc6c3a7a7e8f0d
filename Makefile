# One command a job. Each sets up what it needs in .venv, with Python 3.10+ and access to a package index.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: compare test lint docs bench record package clean

compare: $(STAMP)  ## every rule on the bundled model pair
	$(BIN)/acceptlib compare

test: lint docs  ## linters, types, the site and all tests
	$(BIN)/pytest -n 2 --dist worksteal

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(STAMP)  ## the site, in site/; every warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(STAMP)  ## every strategy and installed peer on every workload, and the ratios of the performance page
	$(BIN)/pytest bench --benchmark-only --benchmark-columns=median,iqr,rounds --benchmark-sort=name --benchmark-max-time=0.3

record: $(STAMP)  ## the CPU's records, four runs of the ratios, and the pages that show them
	for run in 1 2 3 4; do \
		$(BIN)/pytest bench/test_cpu.py --quiet --benchmark-only --record bench/results/cpu.json || exit 1; \
		$(BIN)/pytest bench/test_compat.py --quiet --benchmark-only --record bench/results/cpu-dropins.json || exit 1; \
	done
	$(BIN)/acceptlib compare --output bench/results/compare.json
	$(BIN)/python bench/render.py

package: $(STAMP)  ## wheel and sdist in dist/
	$(BIN)/python -m build --no-isolation --outdir dist

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .[dev]
	touch $@

clean:
	rm -rf $(VENV) dist site .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
