# Two commands on a bare machine with Python 3.11 or 3.12: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
DEMO ?= demo

.DEFAULT_GOAL := help
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: help install demo quick test faults check testbed-up testbed-down clean

help:  ## list targets
	@sed -n 's/^\([a-z-]*\):.*## /\1 - /p' Makefile | awk -F ' - ' '{printf "  %-14s %s\n", $$1, $$2}'

install: $(STAMP)  ## install everything into .venv

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: install  ## run the main sweep on this machine, without GPU and Slurm; merge and report
	@rm -rf $(DEMO)
	$(BIN)/python -m inpaint_bench.launch -m gpu=a40,a100,h200 batch=8,16,32 profile=demo hydra.sweep.dir=$(DEMO)/sweep
	$(BIN)/python -m inpaint_bench merge $(DEMO)/sweep -o $(DEMO)/dataset
	$(BIN)/python -m inpaint_bench report $(DEMO)/dataset -o $(DEMO)/report

quick: install  ## run the tests that need no torch, Slurm, browser or subprocess
	$(PYTEST) --quick

test: check  ## run all checks and tests but the faults, on real Slurm
	$(BIN)/python -m tests.testbed install || test -z "$(INPAINT_BENCH_REQUIRE_TESTBED)"
	$(BIN)/python -m tests.browser install || test -z "$(INPAINT_BENCH_REQUIRE_BROWSER)"
	$(PYTEST) -m "not faults"

faults: install  ## break sweeps in twenty ways on real Slurm: about 8 minutes
	$(BIN)/python -m tests.testbed install
	INPAINT_BENCH_REQUIRE_TESTBED=1 $(BIN)/python -m pytest -m faults tests/faults

check: install  ## check lint, format, types and import layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

testbed-up: install  ## start two real Slurm clusters, grace and delta, on this machine
	$(BIN)/python -m tests.testbed install
	$(BIN)/python -m tests.testbed up

testbed-down: install  ## stop them and remove their files
	$(BIN)/python -m tests.testbed down

clean:  ## remove .venv and the output of all targets
	rm -rf .venv $(DEMO) dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
