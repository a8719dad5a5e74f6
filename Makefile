# Two commands on a bare machine with Python 3.11 to 3.14: `make demo` and `make test`.
PYTHON ?= python3
ifeq ($(origin SLURM),command line)
# The targets are made in a folder with the Debian that has this Slurm, by its Python: tests/testbed/suites.py.
GOALS := $(or $(MAKECMDGOALS),help)
.PHONY: $(GOALS)
$(GOALS):
	@$(PYTHON) -m tests.testbed make '$(SLURM)' $@ $(filter-out SLURM=% PYTHON=%,$(MAKEOVERRIDES))
else
BIN := .venv/bin
INSTALLED := .venv/.installed-
# The build of PyTorch: cpu, cu126 (CUDA 12) or cu130 (CUDA 13). Default: the one in .venv, else cpu.
TORCH ?= $(or $(patsubst $(INSTALLED)%,%,$(firstword $(wildcard $(INSTALLED)*))),cpu)
ifeq ($(filter cpu cu126 cu130,$(TORCH)),)
$(error TORCH=$(TORCH): must be cpu, cu126 (CUDA 12) or cu130 (CUDA 13))
endif
STAMP := $(INSTALLED)$(TORCH)
DEV := .venv/.dev
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt
DEMO ?= demo
DEMO_OUTPUT := $(DEMO)/sweep $(DEMO)/dataset $(DEMO)/report

.DEFAULT_GOAL := help
# Tests of a group (tests/tiers.py) run on one worker.
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder

.PHONY: help install demo quick test faults check check-lint check-types check-imports check-docs docs testbed-up testbed-down clean

help:  ## list targets
	@sed -n 's/^\([a-z-]*\):.*## /\1 - /p' Makefile | awk -F ' - ' '{printf "  %-14s %s\n", $$1, $$2}'

install: $(STAMP)  ## install everything into .venv, for CPUs; for GPUs TORCH=cu126 (CUDA 12) or TORCH=cu130 (CUDA 13)

# An environment without the stamp is of a try that failed or of another build: it is made anew.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:3]; sys.exit(None if (3, 11) <= v < (3, 15) else "inpaint_bench \
	needs Python 3.11 to 3.14, and $(PYTHON) is %d.%d.%d: name another one, such as make PYTHON=python3.12 install" % v)'
	@test -e $@ || $(PYTHON) -m venv --clear .venv
	@echo 'Installing into .venv, with the $(TORCH) build of PyTorch: minutes without output.'
	@$(PIP) --no-deps torch --index-url https://download.pytorch.org/whl/$(TORCH) || { \
	echo 'PyTorch for $(TORCH) was not installed, for the reason above. If there is no wheel for $(PYTHON), name another' \
	'Python: make PYTHON=python3.12 TORCH=$(TORCH) install. For CUDA 13, PyTorch 2.13 has wheels for 3.11 to 3.14.' >&2; exit 1; }
	@$(PIP) --upgrade --editable '.[train]'
	@touch $@
	@echo 'Installed. To use it: source .venv/bin/activate && inpaint-bench --help'

$(DEV): $(STAMP)
	@echo 'Installing the tools of the tests and checks.'
	@$(PIP) --upgrade --editable '.[train,dev]'
	@touch $@

demo: install  ## run the main sweep on this machine, without GPU and Slurm; merge and report
	@rm -rf $(DEMO_OUTPUT)
	@echo 'Nine runs in turn on this processor, with a tiny model: this takes minutes. No GPU is measured: the telemetry is recorded or invented.'
	$(BIN)/python -m inpaint_bench.launch -m gpu=a40,a100,h200 batch=8,16,32 profile=demo hydra.sweep.dir=$(DEMO)/sweep
	$(BIN)/python -m inpaint_bench merge $(DEMO)/sweep -o $(DEMO)/dataset
	$(BIN)/python -m inpaint_bench report $(DEMO)/dataset -o $(DEMO)/report

quick: $(DEV)  ## run the tests that need no torch, Slurm, browser or process: about a minute
	$(PYTEST) --quick

test: check  ## run all checks and tests but the faults, some on real Slurm: about 25 minutes
	$(BIN)/python -m tests.testbed install || test -z "$(INPAINT_BENCH_REQUIRE_TESTBED)"
	$(BIN)/python -m tests.browser install || test -z "$(INPAINT_BENCH_REQUIRE_BROWSER)"
	$(PYTEST) --quick
	$(PYTEST) -m test

faults: $(DEV)  ## run what takes minutes: sweeps broken on real Slurm, compilers, thousands of mutations: up to an hour; SLURM=24.11 or SLURM=26.05: on that Slurm
	$(BIN)/python -m tests.testbed install
	INPAINT_BENCH_REQUIRE_TESTBED=1 $(PYTEST) -m faults

check: $(DEV)  ## check lint, format, types, import layers and the links of the documentation
	@$(MAKE) --no-print-directory --keep-going --jobs 4 --output-sync=target check-types check-docs check-imports check-lint

check-lint:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

check-types:
	$(BIN)/mypy

check-imports:
	$(BIN)/lint-imports --no-logo

check-docs:
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs: $(DEV)  ## build the documentation with the reports of all datasets as a site: site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/inpaint-bench report benchmarks/results -o site/reports --export none

testbed-up: $(DEV)  ## start two real Slurm clusters, grace and delta, on this machine
	$(BIN)/python -m tests.testbed install
	$(BIN)/python -m tests.testbed up

testbed-down: $(DEV)  ## stop them and remove their files
	$(BIN)/python -m tests.testbed down

clean:  ## remove .venv and the output of all targets
	rm -rf .venv $(DEMO_OUTPUT) dist site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
endif
