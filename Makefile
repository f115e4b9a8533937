# Everything runs in .venv, which is made on demand and re-used while pyproject.toml and constraints.txt stay the same.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CORE := $(VENV)/core.stamp
DEV := $(VENV)/dev.stamp
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input install -qq --constraint constraints.txt
DEMO ?=
FUZZ_SECONDS ?= 600
KILLS ?= 200
DUMPS ?= .cache/sessions/dumps
GIGABYTES ?= 4
ENGINES ?=

.PHONY: help venv sessions demo demo-quality test lint typecheck pytest model fuzz crash bench engines clean
.DELETE_ON_ERROR:

help:
	@echo "make demo          the main job on real snapshots: a table of ratios beside general tools"
	@echo "make demo-quality  the same snapshots, scored by the real model (installs torch)"
	@echo "make sessions      the dumps of fixtures/, unpacked to .cache/sessions"
	@echo "make test          lint, types and the whole test suite (installs torch, makes the real model)"
	@echo "make lint          ruff       make typecheck   mypy       make pytest   the test suite alone"
	@echo "make fuzz crash    long searches for crashes (FUZZ_SECONDS=$(FUZZ_SECONDS), KILLS=$(KILLS))"
	@echo "make bench         speed and peak memory on this machine (DUMPS=$(DUMPS), GIGABYTES=$(GIGABYTES))"
	@echo "make engines       real engines, cold and warm, in environments of their own (ENGINES=$(ENGINES))"
	@echo "make model         SmolLM2-135M-Instruct in .cache/smollm2"
	@echo "make clean         remove caches and .venv"

$(CORE): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "pltpack needs Python 3.11 or later: make PYTHON=python3.x")'
	@echo "installing into $(VENV)"
	@$(PYTHON) -m venv --clear $(VENV)
	@$(PIP) --editable .
	@touch $@

$(DEV): $(CORE)
	@echo "installing development tools, torch and transformers into $(VENV)"
	@$(PIP) --editable '.[dev,eval]'
	@touch $@

venv: $(DEV)

sessions: $(CORE)
	@$(BIN)/python -c 'from pathlib import Path; from benchmarks.capture import unpack; \
		unpack(Path("fixtures/sessions.tar.zst"), Path(".cache/sessions"))'

demo: $(CORE)
	@$(BIN)/python -m benchmarks.demo $(DEMO)

demo-quality: $(DEV)
	@$(BIN)/python -m benchmarks.quality $(DEMO)

test: lint typecheck pytest

lint: $(DEV)
	$(BIN)/ruff check .

typecheck: $(DEV)
	$(BIN)/mypy

pytest: $(DEV)
	$(BIN)/python -m pytest

model: $(DEV)
	$(BIN)/python -m benchmarks.model

fuzz: $(DEV)
	$(BIN)/python -m benchmarks.fuzz --seconds $(FUZZ_SECONDS)

crash: $(CORE)
	$(BIN)/python benchmarks/crash.py --kills $(KILLS)

# DUMPS=FOLDER measures your own.
bench: sessions
	$(BIN)/python benchmarks/speed.py $(DUMPS)
	$(BIN)/python benchmarks/memory.py --gigabytes $(GIGABYTES)

# ENGINES="--engine mlx --profile FILE": see docs/engines/README.md. Building llama.cpp takes 10 to 30 minutes.
engines: $(DEV)
	$(BIN)/python -m benchmarks.engines $(ENGINES)

clean:
	rm -rf $(VENV) .cache build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
