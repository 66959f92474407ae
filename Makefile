# Everything runs in .venv, made on first use from constraints.txt.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TITAN := .versions/torchtitan
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
CODE := $(wildcard src tests benchmarks examples checks)
JOBS ?= 3# tests at a time, of which many wait; 0: one after another, in pytest's own process

.DEFAULT_GOAL := help
.PHONY: help setup check format test-fast test test-all test-device test-device-all test-clusters test-versions test-integrations test-torchtitan demo demo-publish simulate simulate-nightly fuzz idioms idioms-resumed fuzz-idioms fuzz-carried fuzz-shapes fuzz-times gpu bench docs clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(VENV)/.setup ## make .venv with the pinned packages

check: setup ## lint, format, types, import rules, sizes, pages made from code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(CODE)
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m checks.sizes
	$(BIN)/python -m checks.torch_names
	$(BIN)/python -m checks.sentences
	$(BIN)/python -m checks.device_names
	$(BIN)/python docs/protocol_page.py --check
	$(BIN)/python docs/cli_page.py --check
	$(BIN)/python docs/messages_page.py --check
	$(BIN)/python docs/refused_page.py --check

format: setup ## rewrite the code in the project's format
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

test-fast: setup ## the rooms that only decide and show, without processes or torch: some 900 tests in half a minute
	$(BIN)/python -m pytest tests/core tests/chaos tests/goodput tests/watch tests/timeline tests/docs tests/agent/decisions

test: setup ## the tests, without the long matrix; three at a time, JOBS=0: one after another
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal

test-all: setup ## the tests, with the long matrix
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal -m "not gpu and not late"

test-device: setup ## build a device that is late, with g++, and test on it: in minutes
	$(BIN)/python -m tests.device_extension.build
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal -m "late and not all" tests/device_extension

test-device-all: setup ## the same with the long matrix: every way to train, every way to end a rank, every phase
	$(BIN)/python -m tests.device_extension.build
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal -m late tests/device_extension

test-clusters: $(VENV)/.ray $(VENV)/.kubernetes ## jobs on a real Ray, a real Slurm and an emulated Kubernetes; as root, with slurmctld, slurmd, munge, iproute2
	$(BIN)/python -m pytest -m clusters -rs -s tests/clusters

test-integrations: $(VENV)/.huggingface $(VENV)/.lightning ## the tests of integrations that need other packages; installs these
	$(BIN)/python -m pytest tests/integrations
	$(MAKE) test-torchtitan

test-torchtitan: $(TITAN)/.setup ## of these, the ones of torchtitan, with torch 2.14, in an environment of their own
	$(TITAN)/bin/python -m pytest tests/integrations/test_torchtitan.py

demo: setup ## train, break, recover, compare
	$(BIN)/python examples/demo.py

demo-publish: setup ## train and serve at once; kill workers and a server; compare
	$(BIN)/python examples/demo_publish.py

simulate: setup ## three minutes of simulated jobs with new seeds
	$(BIN)/python -m relight.sim --seconds 180 --first $$(( $$(date +%s) * 100000 ))

simulate-nightly: setup ## all planted bugs, every order of small jobs, and ten hours of simulated jobs
	$(BIN)/python -m relight.sim --mutations
	$(BIN)/python -m relight.sim --exhaustive 3 --faults 2
	$(BIN)/python -m relight.sim --exhaustive 4 --faults 2
	$(BIN)/python -m relight.sim --exhaustive 3 --faults 2 --shapes late-private,two-early
	$(BIN)/python -m relight.sim --exhaustive 3 --faults 2 --shapes surprise,one
	$(BIN)/python -m relight.sim --exhaustive 3 --faults 2 --shapes new-buffer
	$(BIN)/python -m relight.sim --exhaustive 3 --faults 2 --shapes new-buffers
	$(BIN)/python -m relight.sim --exhaustive 4 --faults 2 --shapes late-private,two-early
	$(BIN)/python -m relight.sim --seconds 14400 --first $$(( $$(date +%s) * 100000 ))
	$(BIN)/python -m relight.sim --seconds 7200 --first $$(( $$(date +%s) * 100000 )) --with hosts,fallback
	$(BIN)/python -m relight.sim --seconds 7200 --first $$(( $$(date +%s) * 100000 )) --with hosts,fallback,flips
	$(BIN)/python -m relight.sim --seconds 7200 --first $$(( $$(date +%s) * 100000 )) --with writes
	$(BIN)/python -m relight.sim --seconds 1800 --first $$(( $$(date +%s) * 100000 )) --with leaves

fuzz: $(VENV)/.fuzz ## ten minutes of nonsense to a controller, guided by what it reaches
	$(BIN)/python -m tests.wire.fuzz 600

test-versions: setup ## the tests of private interfaces and the short matrix, on each version of torch that is promised
	$(BIN)/python -m tests.versions

idioms: setup ## scripts in the shapes that people publish, with kills in phases and at random times
	$(BIN)/python -m tests.idioms --rounds 3

idioms-resumed: setup ## the same scripts, killed as a whole and started again from a checkpoint
	$(BIN)/python -m tests.idioms.resumed

fuzz-idioms: setup ## ten minutes of scripts composed at random, each disturbed and compared
	$(BIN)/python -m tests.idioms.compose --minutes 10

fuzz-carried: setup ## ten minutes of loops that hold state in any way, interrupted in one process, and compared
	$(BIN)/python -m tests.training.carried_scripts --minutes 10

fuzz-shapes: setup ## ten minutes of the same scripts in other shapes: their state and their blocks elsewhere, with faults
	$(BIN)/python -m tests.idioms.reshaped --minutes 7
	$(BIN)/python -m tests.idioms.reshaped --minutes 3 --restarts

fuzz-times: setup ## ten minutes of state by place and step of its first change, disturbed in one process, and compared
	$(BIN)/python -W ignore -m tests.training.carried_times --minutes 10 --quiet

gpu: ## on a machine with GPUs: what must be shown there, with the installed Python; PARTS=list
	PYTHONPATH=src $(PYTHON) -m benchmarks.gpu $(PARTS)

bench: $(VENV)/.bench ## measure, beside torchft
	$(BIN)/python -m benchmarks

docs: $(VENV)/.docs ## render docs/ into site/
	$(BIN)/mkdocs --quiet build

clean: ## remove caches and build products; keep .venv and runs/
	rm -rf build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.setup: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "relight needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[dev]'
	@touch $@

$(VENV)/.huggingface: $(VENV)/.setup
	$(PIP) --editable '.[huggingface,trl]'
	@touch $@

$(VENV)/.lightning: $(VENV)/.setup
	$(PIP) --editable '.[lightning]'
	@touch $@

$(TITAN)/.setup: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(TITAN)
	sed -e 's/^torch==.*/torch==2.14.1/' -e '/^\(datasets\|dill\|multiprocess\|fsspec\)==/d' constraints.txt > $(TITAN)/constraints.txt
	$(TITAN)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(TITAN)/constraints.txt --editable '.[dev,torchtitan]'
	@touch $@

$(VENV)/.ray: $(VENV)/.setup
	$(PIP) --editable '.[ray]' 'ray[train]'  # Train: for a test of what is refused there
	@touch $@

$(VENV)/.kubernetes: $(VENV)/.setup
	$(PIP) --editable '.[kubernetes]'
	@touch $@

$(VENV)/.bench: $(VENV)/.setup
	$(PIP) --editable '.[bench]'
	@touch $@

$(VENV)/.fuzz: $(VENV)/.setup
	$(PIP) --editable '.[fuzz]'
	@touch $@

$(VENV)/.docs: $(VENV)/.setup
	$(PIP) --editable '.[docs]'
	@touch $@
