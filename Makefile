PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo test test-clients check format clean

help:  ## Show what each target does
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(STAMP)  ## Create .venv and install the project into it, in editable mode

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt "torch==2.13.0"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@

demo: $(STAMP)  ## Train digits on 2 processes, record steps 5-10, merge, summarise
	$(BIN)/python scripts/demo.py

test: $(STAMP)  ## Run the whole test suite
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --ignore=tests/clients

test-clients: $(STAMP)  ## Have other tools read what this one writes, each in an environment of its own
	$(BIN)/python -m pytest tests/clients

check: $(STAMP)  ## Format, lint, types and import contracts, as CI does
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(STAMP)  ## Format the code and apply safe fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## Remove the environment and everything the targets made
	rm -rf $(VENV) .clients demo-output outputs multirun build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
