# The two commands of the README: `make demo` and `make test`. Each sets up .venv by itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PIP_CONSTRAINT := constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test lint types tests figure peers benchmarks clean

demo: $(VENV)/.demo
	$(BIN)/holdfast demo

test: lint types tests

lint: $(VENV)/.dev
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/ruff format --check src tests benchmarks examples

types: $(VENV)/.dev
	$(BIN)/mypy

tests: $(VENV)/.dev
	$(BIN)/python -m pytest

# The picture in the README.
figure: $(VENV)/.demo
	$(BIN)/holdfast demo --figure docs/forgetting.svg

$(VENV)/.demo: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "pip>=25.1"
	$(BIN)/python -m pip install --quiet --editable ".[cli,report,bench]"
	touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(BIN)/python -m pip install --quiet --group dev
	touch $@

# What the speed of curvature is measured against, in a venv of its own: their dependencies are not ours.
PEERS := .venv-peers
peers: $(PEERS)/.ready

$(PEERS)/.ready: pyproject.toml constraints.txt
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet "pip>=25.1"
	$(PEERS)/bin/python -m pip install --quiet --editable . --group peers
	touch $@

# The tables in docs/curvature.md, on this machine.
benchmarks: $(PEERS)/.ready
	$(PEERS)/bin/python benchmarks/curvature.py --out benchmarks/results/curvature-cpu.json

clean:
	rm -rf $(VENV) $(PEERS) holdfast-demo.html .pytest_cache .mypy_cache .ruff_cache
