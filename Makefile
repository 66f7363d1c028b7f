# Every target makes its own virtual environment in .venv when it is missing, and installs again only
# when pyproject.toml or constraints.txt changed.

PYTHON ?= python3
ARGS ?=

# Tests run in JOBS processes of OMP_NUM_THREADS threads each.
JOBS ?= 2
OMP_NUM_THREADS ?= 1

# Material for MkDocs would print a notice of its own at every build.
export NO_MKDOCS_2_WARNING := 1

BIN := .venv/bin
# What "dev" in pyproject.toml includes is not installed again.
INCLUDED := $(patsubst %,.venv/.installed-%,test docs plot)
SOURCES := rockmate rkgb solvers tests benchmarks scripts notebooks examples
EXISTING = $(wildcard $(SOURCES))

.DEFAULT_GOAL := help
.PHONY: help demo test check docs package clean

help:
	@echo "make demo   train a small model under a memory budget; ARGS='...' is passed on (try ARGS=--help)"
	@echo "make test   run the tests; ARGS='...' goes to pytest, JOBS=0 runs them in pytest's own process"
	@echo "make check  formatting, lint, types, and the documentation"
	@echo "make docs   build the documentation in site/"
	@echo "make package  build the wheel and the source distribution in dist/, install each, and run it"
	@echo "make clean  remove the virtual environment, caches and outputs"
	@echo "PYTHON=...  the interpreter of the virtual environment, 3.11 or later (now: $(PYTHON))"

demo: .venv/.installed-plot
	$(BIN)/python -m rockmate.demo $(ARGS)

test: .venv/.installed-test
	OMP_NUM_THREADS=$(OMP_NUM_THREADS) $(BIN)/python -m pytest -q -n $(JOBS) $(ARGS)

check: .venv/.installed-dev
	$(BIN)/ruff format --check $(EXISTING)
	$(BIN)/ruff check $(EXISTING)
	$(BIN)/mypy
	$(BIN)/mkdocs build --strict --site-dir site

docs: .venv/.installed-docs
	$(BIN)/mkdocs build --strict --site-dir site

package: .venv/.installed-dev
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist
	rm -rf build *.egg-info
	$(BIN)/twine check --strict dist/*
	$(BIN)/python scripts/check_package.py dist

clean:
	rm -rf .venv build dist out site *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find $(EXISTING) -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/.installed-%: pyproject.toml constraints.txt | .venv/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[$*]" -c constraints.txt
	@touch $@ $(if $(filter dev,$*),$(INCLUDED))
